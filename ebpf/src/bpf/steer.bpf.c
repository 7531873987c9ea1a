// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * steer: hand Portolan's frames to the AF_XDP socket of their queue, leave every other frame to
 * the kernel.
 *
 * What is ours, and nothing else:
 *   ethernet   untagged, destination MAC ours, EtherType ours
 *   udp        untagged, destination MAC ours, IPv4 without options or IPv6 without extension
 *              headers, not a fragment, destination address ours, destination port one of
 *              [base, base + queues)
 * Broadcast and multicast are never ours, nor is traffic this host only routes. A frame that is
 * ours but malformed further in still goes to the engine, which counts it.
 *
 * Ours on a queue without a socket is dropped: passed on, the kernel would answer it with ICMP.
 *
 * A frame of ours may be asked for as an errand (`errands`): the next one of that queue is not given to its socket, but made
 * an empty UDP datagram from nobody to everybody here, as DHCP has them, and passed on. A socket of the kernel's at that port has then
 * received through the queue, which is how the kernel lets a process poll it (SO_INCOMING_NAPI_ID, socket(7)).
 *
 * A VLAN tag is seen only while it is in the frame. A driver that strips tags shows us the frame
 * without one; where VLANs share the interface, turn that off: ethtool -K DEV rxvlan off.
 *
 * Needs nothing but the kernel's uapi headers and libbpf's two headers. Clang >= 14, -mcpu=v3.
 */
#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAX_QUEUES 64

#define IPV4_MORE_FRAGMENTS 0x2000
#define IPV4_OFFSET_MASK 0x1fff

/* The index into `counters`. src/reason.rs mirrors this; a test compares the two. */
enum steer_reason {
	STEER_REDIRECTED,
	STEER_NO_SOCKET,
	STEER_PASS_NOT_OURS,
	STEER_PASS_GROUP,
	STEER_PASS_OTHER_MAC,
	STEER_PASS_OTHER_ADDRESS,
	STEER_PASS_VLAN,
	STEER_PASS_FRAGMENT,
	STEER_PASS_IP_OPTIONS,
	STEER_PASS_TRUNCATED,
	STEER_PASS_ERRAND,
	STEER_REASONS,
};

enum steer_encap {
	STEER_ETHERNET,
	STEER_UDP,
};

enum steer_family {
	STEER_IPV4 = 1,
	STEER_IPV6 = 2,
};

/* Filled by src/config.rs before the program is loaded; the assertions below are its layout. */
struct steer_config {
	__be16 local_mac[3];	/* all zero: any unicast address */
	__be16 ethertype;
	__be32 local_v4;	/* zero: any */
	__be32 local_v6[4];	/* all zero: any */
	__u16 udp_base_port;
	__u16 queues;
	__u8 encap;		/* enum steer_encap */
	__u8 families;		/* of enum steer_family: those that may be ours */
	__u8 reserved[2];
};

_Static_assert(offsetof(struct steer_config, ethertype) == 6, "layout");
_Static_assert(offsetof(struct steer_config, local_v4) == 8, "layout");
_Static_assert(offsetof(struct steer_config, local_v6) == 12, "layout");
_Static_assert(offsetof(struct steer_config, udp_base_port) == 28, "layout");
_Static_assert(offsetof(struct steer_config, queues) == 30, "layout");
_Static_assert(offsetof(struct steer_config, encap) == 32, "layout");
_Static_assert(offsetof(struct steer_config, families) == 33, "layout");
_Static_assert(sizeof(struct steer_config) == 36, "layout");

/* As compiled, UDP without an address family, it claims no frame at all. */
const volatile struct steer_config config = {
	.encap = STEER_UDP,
};

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} xsks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_REASONS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* By queue: the UDP port, in network byte order, at which the next frame of ours is wanted; 0: nowhere. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_QUEUES);
	__type(key, __u32);
	__type(value, __u32);
} errands SEC(".maps");

/*
 * Keys to look up where they lie. One on the stack is a store that a load follows, and for a program that was loaded without CAP_PERFMON the verifier puts a
 * barrier between the two (Spectre v4), which waits for every load before it, the frame's too.
 */
const volatile __u32 keys[MAX_QUEUES] SEC(".rodata.keys") = {
	0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
	22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
	44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

_Static_assert(MAX_QUEUES == 64 && STEER_REASONS <= MAX_QUEUES, "a key for each");

static __always_inline void count_at(const __u32 *key)
{
	__u64 *packets = bpf_map_lookup_elem(&counters, key);

	if (packets)
		(*packets)++;
}

/* Of a reason that is known here. */
#define count(reason) count_at((const __u32 *)&keys[reason])

static __always_inline void count_any(enum steer_reason reason)
{
	__u32 key = reason;

	count_at(&key);
}

/* What is left of the frame. In a frame of several buffers, of its first one. */
struct cursor {
	void *at;
	void *end;
};

/*
 * Points `header` at the next sizeof(*header) bytes; false if the frame ends before. The answer is
 * not the pointer itself: without CAP_PERFMON the verifier forbids comparing that with NULL.
 */
#define take(frame, header) take_bytes(frame, (void **)(header), sizeof(**(header)))

static __always_inline bool take_bytes(struct cursor *frame, void **header, __u32 size)
{
	if (frame->at + size > frame->end)
		return false;
	*header = frame->at;
	frame->at += size;
	return true;
}

static __always_inline enum steer_reason check_mac(const struct ethhdr *eth)
{
	const __be16 *to = (const __be16 *)eth->h_dest;

	if (eth->h_dest[0] & 1)
		return STEER_PASS_GROUP;
	if (!(config.local_mac[0] | config.local_mac[1] | config.local_mac[2]))
		return STEER_REDIRECTED;
	if (to[0] != config.local_mac[0] || to[1] != config.local_mac[1] ||
	    to[2] != config.local_mac[2])
		return STEER_PASS_OTHER_MAC;
	return STEER_REDIRECTED;
}

static __always_inline bool is_local_v4(const struct iphdr *ip)
{
	return !config.local_v4 || ip->daddr == config.local_v4;
}

static __always_inline bool is_local_v6(const struct ipv6hdr *ip)
{
	const __be32 *to = ip->daddr.in6_u.u6_addr32;

	if (!(config.local_v6[0] | config.local_v6[1] | config.local_v6[2] | config.local_v6[3]))
		return true;
	return to[0] == config.local_v6[0] && to[1] == config.local_v6[1] &&
	       to[2] == config.local_v6[2] && to[3] == config.local_v6[3];
}

static __always_inline enum steer_reason check_udp(struct cursor *frame, const struct ethhdr *eth,
						   bool address_is_local)
{
	const struct udphdr *udp;
	__u16 queue;

	if (!take(frame, &udp))
		return STEER_PASS_TRUNCATED;
	/* A port below the base wraps to a number no range reaches: base + queues <= 65536. */
	queue = bpf_ntohs(udp->dest) - config.udp_base_port;
	if (queue >= config.queues)
		return STEER_PASS_NOT_OURS;
	if (!address_is_local)
		return STEER_PASS_OTHER_ADDRESS;
	return check_mac(eth);
}

static __always_inline enum steer_reason check_ipv4(struct cursor *frame, const struct ethhdr *eth)
{
	const struct iphdr *ip;

	if (!take(frame, &ip))
		return STEER_PASS_TRUNCATED;
	if (ip->version != 4 || ip->protocol != IPPROTO_UDP)
		return STEER_PASS_NOT_OURS;
	if (ip->frag_off & bpf_htons(IPV4_MORE_FRAGMENTS | IPV4_OFFSET_MASK))
		return STEER_PASS_FRAGMENT;
	if (ip->ihl < 5)
		return STEER_PASS_NOT_OURS;
	if (ip->ihl > 5)
		return STEER_PASS_IP_OPTIONS;
	return check_udp(frame, eth, is_local_v4(ip));
}

static __always_inline enum steer_reason check_ipv6(struct cursor *frame, const struct ethhdr *eth)
{
	const struct ipv6hdr *ip;

	if (!take(frame, &ip))
		return STEER_PASS_TRUNCATED;
	if (ip->version != 6)
		return STEER_PASS_NOT_OURS;
	switch (ip->nexthdr) {
	case IPPROTO_UDP:
		return check_udp(frame, eth, is_local_v6(ip));
	case IPPROTO_FRAGMENT:
		return STEER_PASS_FRAGMENT;
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
		return STEER_PASS_IP_OPTIONS;
	default:
		return STEER_PASS_NOT_OURS;
	}
}

/*
 * Whether the frame is ours as nearly all of ours are, UDP over IPv4 to the one address and MAC we have: all that decides compared at once, but
 * the port. If not, `classify` says what it is.
 */
static __always_inline bool is_plain(const struct xdp_md *ctx)
{
	void *at = (void *)(long)ctx->data;
	void *end = (void *)(long)ctx->data_end;
	const __be16 *eth = at;
	const struct iphdr *ip = at + sizeof(struct ethhdr);
	const struct udphdr *udp = at + sizeof(struct ethhdr) + sizeof(*ip);
	const __u8 *version = (const __u8 *)ip;
	__u32 other;
	__u16 queue;

	if (config.encap != STEER_UDP || !(config.families & STEER_IPV4))
		return false;
	if (!config.local_v4 ||
	    !(config.local_mac[0] | config.local_mac[1] | config.local_mac[2]))
		return false;
	if (at + sizeof(struct ethhdr) + sizeof(*ip) + sizeof(*udp) > end)
		return false;
	other = eth[0] ^ config.local_mac[0];
	other |= eth[1] ^ config.local_mac[1];
	other |= eth[2] ^ config.local_mac[2];
	other |= eth[0] & bpf_htons(0x0100); /* a group */
	other |= eth[6] ^ bpf_htons(ETH_P_IP);
	other |= *version ^ 0x45; /* version 4, five words of header */
	other |= ip->frag_off & bpf_htons(IPV4_MORE_FRAGMENTS | IPV4_OFFSET_MASK);
	other |= ip->protocol ^ IPPROTO_UDP;
	other |= ip->daddr ^ config.local_v4;
	queue = bpf_ntohs(udp->dest) - config.udp_base_port;
	return !other && queue < config.queues;
}

/* STEER_REDIRECTED if the frame is ours, else why it is not. */
static __always_inline enum steer_reason classify(const struct xdp_md *ctx)
{
	struct cursor frame = {
		.at = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};
	const struct ethhdr *eth;

	if (!take(&frame, &eth))
		return STEER_PASS_TRUNCATED;
	if (eth->h_proto == bpf_htons(ETH_P_8021Q) || eth->h_proto == bpf_htons(ETH_P_8021AD))
		return STEER_PASS_VLAN;

	if (config.encap == STEER_ETHERNET) {
		if (eth->h_proto != config.ethertype)
			return STEER_PASS_NOT_OURS;
		return check_mac(eth);
	}
	if (eth->h_proto == bpf_htons(ETH_P_IP) && config.families & STEER_IPV4)
		return check_ipv4(&frame, eth);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6) && config.families & STEER_IPV6)
		return check_ipv6(&frame, eth);
	return STEER_PASS_NOT_OURS;
}

/* The checksum (RFC 1071) of a header without options, from 0.0.0.0 to 255.255.255.255, for 28 bytes of UDP with a TTL of 64. */
#define ERRAND_CHECKSUM 0x7ad2

/* Makes the frame a datagram for this port. False: it is too short for that. */
static __always_inline bool send_on_errand(struct xdp_md *ctx, __be16 port)
{
	struct cursor frame = {
		.at = (void *)(long)ctx->data,
		.end = (void *)(long)ctx->data_end,
	};
	struct ethhdr *eth;
	struct iphdr *ip;
	struct udphdr *udp;

	if (!take(&frame, &eth) || !take(&frame, &ip) || !take(&frame, &udp))
		return false;
	eth->h_proto = bpf_htons(ETH_P_IP);
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(sizeof(*ip) + sizeof(*udp));
	ip->ttl = 64;
	ip->protocol = IPPROTO_UDP;
	ip->check = bpf_htons(ERRAND_CHECKSUM);
	ip->daddr = 0xffffffff;
	udp->source = 0;
	udp->dest = port;
	udp->len = bpf_htons(sizeof(*udp));
	udp->check = 0;
	return true;
}

static __always_inline int steer_frame(struct xdp_md *ctx)
{
	enum steer_reason reason = is_plain(ctx) ? STEER_REDIRECTED : classify(ctx);
	__u32 queue = ctx->rx_queue_index;
	__u32 *errand = NULL;

	if (reason != STEER_REDIRECTED) {
		count_any(reason);
		return XDP_PASS;
	}
	if (queue < MAX_QUEUES)
		errand = bpf_map_lookup_elem(&errands, (const __u32 *)&keys[queue]);
	if (errand && *errand) {
		__be16 port = *errand;

		*errand = 0;
		if (send_on_errand(ctx, port)) {
			count(STEER_PASS_ERRAND);
			return XDP_PASS;
		}
	}
	/* Without an entry for the queue the helper returns its last argument. */
	if (bpf_redirect_map(&xsks, queue, XDP_DROP) != XDP_REDIRECT) {
		count(STEER_NO_SOCKET);
		return XDP_DROP;
	}
	count(STEER_REDIRECTED);
	return XDP_REDIRECT;
}

SEC("xdp.frags")
int steer(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}

/* The same for kernels before 5.18, which refuse the flag that "xdp.frags" sets, and for frames of one buffer in generic mode. */
SEC("xdp")
int steer_linear(struct xdp_md *ctx)
{
	return steer_frame(ctx);
}

char LICENSE[] SEC("license") = "Dual MIT/GPL";
