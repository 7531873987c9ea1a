/* libfabric: messages between two reliable datagram endpoints (FI_EP_RDM), receives posted ahead. */
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

/* What the library writes into while an operation is under way. */
#define HANDLE struct fi_context2
#include "buffers.h"
#include "peer.h"

#define EVENTS 64

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_ep *endpoint;
static struct fid_cq *sends, *receives;
static struct fid_av *addresses;
static fi_addr_t other;
static struct buffers out, in;
static size_t message;
static uint64_t job;

static int bad(const char *what, ssize_t error)
{
	return failed("%s: %s", what, fi_strerror((int)-error));
}

int peer_open(int side, const char *device, const char *own, const char *provider, unsigned char *address, size_t *len)
{
	struct fi_cq_attr of_queue = { .format = FI_CQ_FORMAT_TAGGED, .wait_obj = FI_WAIT_NONE, .size = 4096 };
	struct fi_av_attr of_addresses = { .type = FI_AV_TABLE };
	struct fi_info *hints = fi_allocinfo();
	int status;

	(void)side, (void)device;
	if (!hints)
		return failed("fi_allocinfo");
	hints->ep_attr->type = FI_EP_RDM;
	hints->caps = FI_TAGGED;
	hints->mode = FI_CONTEXT | FI_CONTEXT2;
	hints->domain_attr->threading = FI_THREAD_DOMAIN;
	hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
	hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
	hints->fabric_attr->prov_name = strdup(provider);
	status = fi_getinfo(FI_VERSION(1, 14), own, NULL, FI_SOURCE, hints, &info);
	fi_freeinfo(hints);
	if (status)
		return bad("fi_getinfo", status);
	if ((status = fi_fabric(info->fabric_attr, &fabric, NULL)))
		return bad("fi_fabric", status);
	if ((status = fi_domain(fabric, info, &domain, NULL)))
		return bad("fi_domain", status);
	if ((status = fi_cq_open(domain, &of_queue, &sends, NULL)) || (status = fi_cq_open(domain, &of_queue, &receives, NULL)))
		return bad("fi_cq_open", status);
	if ((status = fi_av_open(domain, &of_addresses, &addresses, NULL)))
		return bad("fi_av_open", status);
	if ((status = fi_endpoint(domain, info, &endpoint, NULL)))
		return bad("fi_endpoint", status);
	if ((status = fi_ep_bind(endpoint, &addresses->fid, 0)) || (status = fi_ep_bind(endpoint, &sends->fid, FI_TRANSMIT)) ||
	    (status = fi_ep_bind(endpoint, &receives->fid, FI_RECV)))
		return bad("fi_ep_bind", status);
	if ((status = fi_enable(endpoint)))
		return bad("fi_enable", status);
	if ((status = fi_getname(&endpoint->fid, address, len)))
		return bad("fi_getname", status);
	return 0;
}

int peer_connect(const unsigned char *address, size_t len)
{
	int count = fi_av_insert(addresses, address, 1, &other, 0, NULL);

	(void)len;
	return count == 1 ? 0 : failed("fi_av_insert: %d", count);
}

/* Takes what ended. */
static int look(struct fid_cq *queue, struct buffers *of)
{
	struct fi_cq_tagged_entry entries[EVENTS];
	struct fi_cq_err_entry error = { 0 };
	ssize_t count = fi_cq_read(queue, entries, EVENTS), i;
	struct slot *slot;

	if (count == -FI_EAGAIN)
		return 0;
	if (count == -FI_EAVAIL) {
		if (fi_cq_readerr(queue, &error, 0) < 0)
			return failed("fi_cq_readerr");
		if (error.err != FI_ECANCELED)
			return failed("an operation ended: %s", fi_strerror(error.err));
		entries[0].op_context = error.op_context;
		entries[0].len = SIZE_MAX;
		count = 1;
	}
	if (count < 0)
		return bad("fi_cq_read", count);
	for (i = 0; i < count; i++) {
		/* The handle is a slot's first field. */
		slot = entries[i].op_context;
		slot->length = entries[i].len;
		slot->busy = 0;
		of->busy--;
	}
	return 0;
}

static int post(struct slot *slot)
{
	ssize_t status;

	while ((status = fi_trecv(endpoint, slot->data, message, NULL, FI_ADDR_UNSPEC, job, 0, &slot->handle)) == -FI_EAGAIN)
		if (look(receives, &in) || look(sends, &out))
			return -1;
	if (status)
		return bad("fi_trecv", status);
	slot->busy = 1;
	in.busy++;
	return 0;
}

int peer_prepare(size_t bytes, size_t window)
{
	size_t most = info->rx_attr->size < info->tx_attr->size ? info->rx_attr->size : info->tx_attr->size;
	size_t i;

	for (i = 0; i < in.count; i++)
		if (in.slots[i].busy)
			fi_cancel(&endpoint->fid, &in.slots[i].handle);
	while (in.busy)
		if (look(receives, &in) || look(sends, &out))
			return -1;
	job++;
	message = bytes;
	/* No more than the endpoint's queues hold. */
	if (most && window > most / 2)
		window = most / 2;
	if (buffers_make(&out, bytes, window) || buffers_make(&in, bytes, window))
		return -1;
	for (i = 0; i < window; i++)
		if (post(&in.slots[i]))
			return -1;
	return 0;
}

int peer_send(void)
{
	struct slot *slot = buffers_next(&out);
	ssize_t status;

	if (slot->busy) {
		if (look(sends, &out))
			return -1;
		if (slot->busy)
			return 0;
	}
	status = fi_tsend(endpoint, slot->data, message, NULL, other, job, &slot->handle);
	if (status == -FI_EAGAIN)
		return look(sends, &out);
	if (status)
		return bad("fi_tsend", status);
	slot->busy = 1;
	out.busy++;
	buffers_advance(&out);
	return 1;
}

int64_t peer_receive(void)
{
	struct slot *slot = buffers_next(&in);
	int64_t length;

	if (slot->busy) {
		/* Reading the queue is what moves the library on; what was sent needs that too. */
		if (look(receives, &in) || (out.busy && look(sends, &out)))
			return -2;
		if (slot->busy)
			return -1;
	}
	length = (int64_t)slot->length;
	if (post(slot))
		return -2;
	buffers_advance(&in);
	return length;
}

int peer_settled(void)
{
	if (look(sends, &out))
		return -1;
	return out.busy == 0;
}

void peer_close(void)
{
}

const char *peer_version(void)
{
	static char text[32];
	uint32_t version = fi_version();

	snprintf(text, sizeof(text), "%u.%u", FI_MAJOR(version), FI_MINOR(version));
	return text;
}
