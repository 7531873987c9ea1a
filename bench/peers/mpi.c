/* MPI: two ranks, non-blocking sends and receives in a window, as the usual bandwidth tests have them. */
#include <mpi.h>

#define HANDLE MPI_Request
#include "buffers.h"
#include "peer.h"

#define WINDOW 64

static int other;
static struct buffers out, in;
static size_t message;
static int job;

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

static int post(struct slot *slot)
{
	int status = MPI_Irecv(slot->data, (int)message, MPI_BYTE, other, job, MPI_COMM_WORLD, &slot->handle);

	slot->busy = status == MPI_SUCCESS;
	return slot->busy ? 0 : bad("MPI_Irecv", status);
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
	job++;
	message = bytes;
	/* As many as the usual bandwidth tests have. */
	if (window > WINDOW)
		window = WINDOW;
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
	int status = ended(slot);

	if (status <= 0)
		return status;
	status = MPI_Isend(slot->data, (int)message, MPI_BYTE, other, job, MPI_COMM_WORLD, &slot->handle);
	if (status != MPI_SUCCESS)
		return bad("MPI_Isend", status);
	slot->busy = 1;
	buffers_advance(&out);
	return 1;
}

int64_t peer_receive(void)
{
	struct slot *slot = buffers_next(&in);
	int64_t length;
	int status = ended(slot);

	if (status <= 0)
		return status == 0 ? -1 : -2;
	length = (int64_t)slot->length;
	if (post(slot))
		return -2;
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
