/*
 * What the bench asks of a library it is compared with.
 *
 * Each peer is a shared object that exports these functions; the bench loads it into the same actor that measures everybody else
 * (bench/src/actor/foreign.rs), so sizes, windows, clocks and counting are the same for all. One thread, one instance per process.
 * Nothing here waits longer than the library itself does.
 */
#ifndef PORTOLAN_BENCH_PEER_H
#define PORTOLAN_BENCH_PEER_H

#include <stddef.h>
#include <stdint.h>

/* Starts the library on side 1 or 2. `device` and `own` are the interface and its IPv4 address, `provider` which of its transports is
 * meant, where there is a choice. Writes at most *len bytes that the other side needs to find us, and their number. 0, or -1. */
int peer_open(int side, const char *device, const char *own, const char *provider, unsigned char *address, size_t *len);

/* What the other side's peer_open wrote. 0, or -1. */
int peer_connect(const unsigned char *address, size_t len);

/* Gets ready for messages of this length, of which at most `window` are under way each way. All earlier ones have ended. 0, or -1. */
int peer_prepare(size_t bytes, size_t window);

/* Hands a message over: 1; not now: 0; -1. */
int peer_send(void);

/* The length of the next message that came; nothing there: -1; -2: an error. */
int64_t peer_receive(void);

/* Whether everything that was sent has left our buffers: 1 or 0; -1. */
int peer_settled(void);

/* The end. */
void peer_close(void);

/* What went wrong last. */
const char *peer_error(void);

/* The library's own word on its version. */
const char *peer_version(void);

#endif
