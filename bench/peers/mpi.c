/* MPI: two ranks, non-blocking sends and receives in a window, as the usual bandwidth tests have them: a sender also waits for who receives,
 * which says so by an empty message. Without that MPI takes whatever comes and lets who sends go on, until memory is full of it; not of long
 * messages, for each of which it asks the receiver first. */
#include <mpi.h>

#define HANDLE MPI_Request
#include "buffers.h"
#include "peer.h"

#define WINDOW 64
/* btl_tcp_eager_limit. */
#define ASKED_FOR (64 << 10)

static int other;
static struct buffers out, in;
static size_t message;
static int job;
/* Messages that may be out before the other side has said that it took some; it does so for half of them at once. */
static size_t bound, half;
static size_t unanswered, untold;
static MPI_Request answer = MPI_REQUEST_NULL, telling = MPI_REQUEST_NULL;

static int bad(const char *what, int code)
{
	char text[MPI_MAX_ERROR_STRING] = "";
	int len;

	MPI_Error_string(code, text, &len);
	return failed("%s: %s", what, text);
}

int peer_open(int side, const char *device, const char *own, const char *provider, unsigned char *address, size_t *len)
{
	int status = MPI_Init(NULL, NULL), rank, ranks;

	(void)device, (void)own, (void)provider, (void)address;
	if (status != MPI_SUCCESS)
		return bad("MPI_Init", status);
	MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	if (ranks != 2 || rank != side - 1)
		return failed("rank %d of %d on side %d", rank, ranks, side);
	other = 1 - rank;
	*len = 0;
	return 0;
}

int peer_connect(const unsigned char *address, size_t len)
{
	(void)address, (void)len;
	return 0;
}

static int data_tag(void)
{
	return 2 * job;
}

static int answer_tag(void)
{
	return 2 * job + 1;
}

static int post(struct slot *slot)
{
	int status = MPI_Irecv(slot->data, (int)message, MPI_BYTE, other, data_tag(), MPI_COMM_WORLD, &slot->handle);

	slot->busy = status == MPI_SUCCESS;
	return slot->busy ? 0 : bad("MPI_Irecv", status);
}

static int await_answer(void)
{
	int status = MPI_Irecv(NULL, 0, MPI_BYTE, other, answer_tag(), MPI_COMM_WORLD, &answer);

	return status == MPI_SUCCESS ? 0 : bad("MPI_Irecv", status);
}

/* Whether another message may be sent: 1 or 0; -1. */
static int may_send(void)
{
	int flag, status;

	if (unanswered < bound)
		return 1;
	status = MPI_Test(&answer, &flag, MPI_STATUS_IGNORE);
	if (status != MPI_SUCCESS)
		return bad("MPI_Test", status);
	if (!flag)
		return 0;
	unanswered -= half;
	return await_answer() ? -1 : 1;
}

/* Says what was taken, unless the last word of it is still on its way. */
static int tell(void)
{
	int flag, status;

	if (untold < half)
		return 0;
	status = MPI_Test(&telling, &flag, MPI_STATUS_IGNORE);
	if (status != MPI_SUCCESS)
		return bad("MPI_Test", status);
	if (!flag)
		return 0;
	status = MPI_Isend(NULL, 0, MPI_BYTE, other, answer_tag(), MPI_COMM_WORLD, &telling);
	if (status != MPI_SUCCESS)
		return bad("MPI_Isend", status);
	untold -= half;
	return 0;
}

int peer_prepare(size_t bytes, size_t window)
{
	size_t i;

	for (i = 0; i < in.count; i++) {
		if (!in.slots[i].busy)
			continue;
		MPI_Cancel(&in.slots[i].handle);
		MPI_Wait(&in.slots[i].handle, MPI_STATUS_IGNORE);
	}
	if (answer != MPI_REQUEST_NULL) {
		MPI_Cancel(&answer);
		MPI_Wait(&answer, MPI_STATUS_IGNORE);
	}
	job++;
	message = bytes;
	/* As many as the usual bandwidth tests have. */
	if (window > WINDOW)
		window = WINDOW;
	bound = half = SIZE_MAX;
	if (bytes <= ASKED_FOR) {
		bound = window;
		half = window > 1 ? window / 2 : 1;
	}
	unanswered = untold = 0;
	if (await_answer())
		return -1;
	if (buffers_make(&out, bytes, window) || buffers_make(&in, bytes, window))
		return -1;
	for (i = 0; i < window; i++)
		if (post(&in.slots[i]))
			return -1;
	return 0;
}

/* Whether a slot's operation has ended: 1 or 0; -1. */
static int ended(struct slot *slot)
{
	MPI_Status how;
	int flag, count, status;

	if (!slot->busy)
		return 1;
	status = MPI_Test(&slot->handle, &flag, &how);
	if (status != MPI_SUCCESS)
		return bad("MPI_Test", status);
	if (!flag)
		return 0;
	MPI_Get_count(&how, MPI_BYTE, &count);
	slot->length = (size_t)count;
	slot->busy = 0;
	return 1;
}

int peer_send(void)
{
	struct slot *slot = buffers_next(&out);
	int status = may_send();

	if (status > 0)
		status = ended(slot);
	if (status <= 0)
		return status;
	status = MPI_Isend(slot->data, (int)message, MPI_BYTE, other, data_tag(), MPI_COMM_WORLD, &slot->handle);
	if (status != MPI_SUCCESS)
		return bad("MPI_Isend", status);
	slot->busy = 1;
	unanswered++;
	buffers_advance(&out);
	return 1;
}

int64_t peer_receive(void)
{
	struct slot *slot = buffers_next(&in);
	int64_t length;
	int status;

	if (tell())
		return -2;
	status = ended(slot);
	if (status <= 0)
		return status == 0 ? -1 : -2;
	length = (int64_t)slot->length;
	if (post(slot))
		return -2;
	untold++;
	buffers_advance(&in);
	return length;
}

int peer_settled(void)
{
	size_t i;
	int status;

	for (i = 0; i < out.count; i++)
		if ((status = ended(&out.slots[i])) <= 0)
			return status;
	return 1;
}

void peer_close(void)
{
	MPI_Finalize();
}

const char *peer_version(void)
{
	static char text[MPI_MAX_LIBRARY_VERSION_STRING];
	int len;

	MPI_Get_library_version(text, &len);
	return text;
}
