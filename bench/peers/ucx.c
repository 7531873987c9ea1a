/* UCX: tagged messages between two workers, receives posted ahead, as its users (MPI libraries among them) do. */
#include <ucp/api/ucp.h>

#define HANDLE void *
#include "buffers.h"
#include "peer.h"

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static struct buffers out, in;
static size_t message;
/* A tag per job: what was posted for the last one meets nothing of this. */
static ucp_tag_t job;

static int bad(const char *what, ucs_status_t status)
{
	return failed("%s: %s", what, ucs_status_string(status));
}

int peer_open(int side, const char *device, const char *own, const char *provider, unsigned char *address, size_t *len)
{
	ucp_params_t parameters = { .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG };
	ucp_worker_params_t of_worker = {
		.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
		.thread_mode = UCS_THREAD_MODE_SINGLE,
	};
	ucp_config_t *config;
	ucp_address_t *ours;
	ucs_status_t status;
	size_t size;

	(void)side, (void)own;
	if ((status = ucp_config_read(NULL, NULL, &config)) != UCS_OK)
		return bad("ucp_config_read", status);
	if ((status = ucp_config_modify(config, "TLS", provider)) != UCS_OK)
		return bad("TLS", status);
	if ((status = ucp_config_modify(config, "NET_DEVICES", device)) != UCS_OK)
		return bad("NET_DEVICES", status);
	status = ucp_init(&parameters, config, &context);
	ucp_config_release(config);
	if (status != UCS_OK)
		return bad("ucp_init", status);
	if ((status = ucp_worker_create(context, &of_worker, &worker)) != UCS_OK)
		return bad("ucp_worker_create", status);
	if ((status = ucp_worker_get_address(worker, &ours, &size)) != UCS_OK)
		return bad("ucp_worker_get_address", status);
	if (size > *len)
		return failed("an address of %zu bytes", size);
	memcpy(address, ours, size);
	*len = size;
	ucp_worker_release_address(worker, ours);
	return 0;
}

int peer_connect(const unsigned char *address, size_t len)
{
	ucp_ep_params_t parameters = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
		.address = (const ucp_address_t *)address,
	};
	ucs_status_t status;

	(void)len;
	status = ucp_ep_create(worker, &parameters, &endpoint);
	return status == UCS_OK ? 0 : bad("ucp_ep_create", status);
}

static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *of)
{
	struct slot *slot = of;

	slot->length = status == UCS_OK ? info->length : SIZE_MAX;
	slot->handle = NULL;
	slot->busy = 0;
	ucp_request_free(request);
}

static void sent(void *request, ucs_status_t status, void *of)
{
	struct slot *slot = of;

	if (status != UCS_OK)
		bad("a send ended", status);
	slot->busy = 0;
	out.busy--;
	ucp_request_free(request);
}

static int post(struct slot *slot)
{
	ucp_request_param_t how = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
		.cb.recv = received,
		.user_data = slot,
	};

	slot->busy = 1;
	slot->handle = ucp_tag_recv_nbx(worker, slot->data, message, job, UINT64_MAX, &how);
	if (UCS_PTR_IS_ERR(slot->handle))
		return bad("ucp_tag_recv_nbx", UCS_PTR_STATUS(slot->handle));
	return 0;
}

int peer_prepare(size_t bytes, size_t window)
{
	size_t i;

	for (i = 0; i < in.count; i++)
		if (in.slots[i].busy && in.slots[i].handle)
			ucp_request_cancel(worker, in.slots[i].handle);
	for (i = 0; i < in.count; i++)
		while (in.slots[i].busy)
			ucp_worker_progress(worker);
	job++;
	message = bytes;
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
	ucp_request_param_t how = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
		.cb.send = sent,
		.user_data = slot,
	};
	ucs_status_ptr_t request;

	if (slot->busy) {
		ucp_worker_progress(worker);
		if (slot->busy)
			return 0;
	}
	request = ucp_tag_send_nbx(endpoint, slot->data, message, job, &how);
	if (UCS_PTR_IS_ERR(request))
		return bad("ucp_tag_send_nbx", UCS_PTR_STATUS(request));
	if (request) {
		slot->busy = 1;
		out.busy++;
	}
	buffers_advance(&out);
	return 1;
}

int64_t peer_receive(void)
{
	struct slot *slot = buffers_next(&in);

	if (slot->busy) {
		ucp_worker_progress(worker);
		if (slot->busy)
			return -1;
	}
	if (slot->length == SIZE_MAX) {
		failed("a receive ended");
		return -2;
	}
	if (post(slot))
		return -2;
	buffers_advance(&in);
	return (int64_t)message;
}

int peer_settled(void)
{
	ucp_worker_progress(worker);
	return out.busy == 0;
}

void peer_close(void)
{
}

const char *peer_version(void)
{
	return ucp_get_version_string();
}
