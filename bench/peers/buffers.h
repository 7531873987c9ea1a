/*
 * A window of buffers for one direction: used in turn, each with the library's handle of what is under way in it.
 * `HANDLE` is defined by whoever includes this.
 */
#ifndef PORTOLAN_BENCH_BUFFERS_H
#define PORTOLAN_BENCH_BUFFERS_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct slot {
	HANDLE handle;
	char *data;
	size_t length;
	int busy;
};

struct buffers {
	struct slot *slots;
	char *memory;
	size_t count;
	size_t next;
	size_t busy;
};

static char peer_problem[512] = "nothing";

static int failed(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(peer_problem, sizeof(peer_problem), format, arguments);
	va_end(arguments);
	return -1;
}

const char *peer_error(void)
{
	return peer_problem;
}

/* Each is a multiple of a cache line long and touched before it is used. */
static int buffers_make(struct buffers *buffers, size_t bytes, size_t count)
{
	size_t stride = (bytes + 63) / 64 * 64 + (bytes == 0 ? 64 : 0);
	size_t i;

	free(buffers->slots);
	free(buffers->memory);
	memset(buffers, 0, sizeof(*buffers));
	buffers->slots = calloc(count, sizeof(*buffers->slots));
	if (!buffers->slots || posix_memalign((void **)&buffers->memory, 4096, stride * count))
		return failed("no memory for %zu buffers of %zu bytes", count, bytes);
	memset(buffers->memory, 7, stride * count);
	for (i = 0; i < count; i++)
		buffers->slots[i].data = buffers->memory + i * stride;
	buffers->count = count;
	return 0;
}

static struct slot *buffers_next(struct buffers *buffers)
{
	return &buffers->slots[buffers->next];
}

static void buffers_advance(struct buffers *buffers)
{
	buffers->next = buffers->next + 1 == buffers->count ? 0 : buffers->next + 1;
}

#endif
