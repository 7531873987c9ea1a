//! How long frames should be where the kernel copies them into pages.
//!
//! Problem: on a veth each frame to a socket is copied into pages of its own (`skb_pp_cow_data`, net/core/skbuff.c), of which the first holds what headroom and
//! the kernel's own record leave of it. A frame of an MTU of 9000 takes three and fills little of the last; each costs the same whatever it holds, in either direction:
//! a page or two, a descriptor, a chunk.
//!
//! Idea: the longest frame is the one that moves most bytes for what it costs, by what frames and pages cost together.

/// Bytes of a page.
const PAGE: u32 = 4096;
/// What the first page holds: in front `XDP_PACKET_HEADROOM`, behind it `struct skb_shared_info` (320 bytes on x86-64).
const FIRST: u32 = PAGE - 256 - 320;
const ETHERNET: u32 = 14;
/// What a frame costs beside its pages, and what a page costs: raw frames took 1.3 us of one page and 3.15 us of three (a Zen 4 guest). On a Xeon they took 0.93 and 1.9, so 2 to 2, by
/// which a second page is worth it from an MTU of 5266 on, not of 6021; a third one is not at 9000 by either.
const A_FRAME: u32 = 2;
const A_PAGE: u32 = 5;

/// What frames should use of an interface's MTU.
pub const fn frame_mtu(mtu: u16, on_veth: bool) -> u16 {
    match on_veth {
        true => worthwhile(mtu),
        false => mtu,
    }
}

const fn worthwhile(mtu: u16) -> u16 {
    let frame = mtu as u32 + ETHERNET;
    let Some(behind) = frame.checked_sub(FIRST) else {
        return mtu;
    };
    // Of the pages behind the first one, those that are full.
    let full = behind / PAGE;
    let filled = FIRST + full * PAGE;
    let cost = A_FRAME + A_PAGE * (1 + full);
    if frame * cost >= filled * (cost + A_PAGE) {
        return mtu;
    }
    (filled - ETHERNET) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    // MTUs whose frames fill their last page, little of it, enough of it; the least and the longest. Expect: taken as they are if it is worth it, else without that page.
    #[test]
    fn a_page_that_holds_little_is_not_begun() {
        for (mtu, expected) in [
            (68, 68),
            (576, 576),
            (1500, 1500),
            (3498, 3498),
            (3506, 3506),
            (3507, 3506),
            (4000, 3506),
            (6020, 3506),
            (6021, 6021),
            (7602, 7602),
            (7603, 7602),
            (9000, 7602),
            (10_775, 7602),
            (10_776, 10_776),
            (11_698, 11_698),
            (12_000, 11_698),
            (15_142, 11_698),
            (15_143, 15_143),
            (15_346, 15_346),
        ] {
            assert_eq!(frame_mtu(mtu, true), expected, "{mtu}");
            assert_eq!(frame_mtu(mtu, false), mtu);
        }
        for mtu in 0..=u16::MAX {
            let once = worthwhile(mtu);
            assert!(once <= mtu && worthwhile(once) == once, "{mtu}");
        }
    }
}
