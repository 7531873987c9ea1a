/* Aeron: an exclusive publication and a subscription each way, through the media driver that runs beside. */
#include <sched.h>
#include <stdbool.h>
#include <time.h>

#include <aeronc.h>

#define HANDLE int
#include "buffers.h"
#include "peer.h"

/* Bound on the driver's answers, and on its finding the other. */
#define SECONDS 10
/* Terms: eight of the longest message are the library's own least, more than fits into caches is of no use. */
#define TERM_LEAST ((size_t)4 << 20)
#define TERM_MOST ((size_t)128 << 20)
/* Fragments taken at once, as the library's own samples do. */
#define FRAGMENTS 10
#define PORT 40123

static aeron_t *client;
static aeron_exclusive_publication_t *publication;
static aeron_subscription_t *subscription;
static aeron_fragment_assembler_t *assembler;
static struct buffers out;
static char ours[64], theirs[64];
static int is_first, job;
static size_t message;
static uint64_t came;
static int64_t came_bytes;

static int bad(const char *what)
{
	return failed("%s: %s", what, aeron_errmsg());
}

static int is_late(time_t since)
{
	sched_yield();
	return time(NULL) > since + SECONDS;
}

/* The driver's directory is the provider. */
int peer_open(int side, const char *device, const char *own, const char *provider, unsigned char *address, size_t *len)
{
	aeron_context_t *context;

	(void)device;
	is_first = side == 1;
	if (aeron_context_init(&context) || aeron_context_set_dir(context, provider))
		return bad("context");
	if (aeron_init(&client, context) || aeron_start(client))
		return bad("client");
	snprintf(ours, sizeof(ours), "%s", own);
	*len = strlen(own) + 1;
	memcpy(address, own, *len);
	return 0;
}

int peer_connect(const unsigned char *address, size_t len)
{
	snprintf(theirs, sizeof(theirs), "%.*s", (int)len, (const char *)address);
	return 0;
}

static void received(void *of, const uint8_t *buffer, size_t length, aeron_header_t *header)
{
	(void)of, (void)buffer, (void)header;
	came++;
	came_bytes = (int64_t)length;
}

int peer_prepare(size_t bytes, size_t window)
{
	aeron_async_add_exclusive_publication_t *adding;
	aeron_async_add_subscription_t *subscribing;
	time_t since = time(NULL);
	size_t term = TERM_LEAST;
	char channel[128];

	if (publication)
		aeron_exclusive_publication_close(publication, NULL, NULL);
	if (subscription)
		aeron_subscription_close(subscription, NULL, NULL);
	if (assembler)
		aeron_fragment_assembler_delete(assembler);
	publication = NULL;
	subscription = NULL;
	job++;
	message = bytes;
	came = 0;
	while (term < 8 * bytes && term < TERM_MOST)
		term *= 2;
	if (buffers_make(&out, bytes, window))
		return -1;
	if (aeron_fragment_assembler_create(&assembler, received, NULL))
		return bad("assembler");
	snprintf(channel, sizeof(channel), "aeron:udp?endpoint=%s:%d", ours, PORT);
	if (aeron_async_add_subscription(&subscribing, client, channel, job, NULL, NULL, NULL, NULL))
		return bad("subscription");
	while (!subscription)
		if (aeron_async_add_subscription_poll(&subscription, subscribing) < 0 || is_late(since))
			return bad("subscription");
	snprintf(channel, sizeof(channel), "aeron:udp?endpoint=%s:%d|term-length=%zu", theirs, PORT, term);
	if (aeron_async_add_exclusive_publication(&adding, client, channel, job))
		return bad("publication");
	while (!publication)
		if (aeron_async_add_exclusive_publication_poll(&publication, adding) < 0 || is_late(since))
			return bad("publication");
	/* The second side is prepared first and has nobody to find yet. */
	while (is_first && !(aeron_exclusive_publication_is_connected(publication) && aeron_subscription_image_count(subscription) > 0))
		if (is_late(since))
			return failed("the two sides do not find each other");
	return 0;
}

int peer_send(void)
{
	int64_t position =
		aeron_exclusive_publication_offer(publication, (const uint8_t *)buffers_next(&out)->data, message, NULL, NULL);

	switch (position) {
	case AERON_PUBLICATION_NOT_CONNECTED:
	case AERON_PUBLICATION_BACK_PRESSURED:
	case AERON_PUBLICATION_ADMIN_ACTION:
		return 0;
	}
	if (position < 0)
		return bad("offer");
	buffers_advance(&out);
	return 1;
}

int64_t peer_receive(void)
{
	if (came == 0 && aeron_subscription_poll(subscription, aeron_fragment_assembler_handler, assembler, FRAGMENTS) < 0) {
		bad("poll");
		return -2;
	}
	if (came == 0)
		return -1;
	came--;
	return came_bytes;
}

int peer_settled(void)
{
	return 1;
}

void peer_close(void)
{
}

const char *peer_version(void)
{
	return aeron_version_full();
}
