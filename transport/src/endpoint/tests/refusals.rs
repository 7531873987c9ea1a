//! A stream that its receiver refused.

use super::shares::{connected, frame, submit};
use super::*;
use crate::endpoint::peer::Reply;
use crate::wire::Chunk;

// A stream was refused, and before that is told it is taken after all (simulator, seed 465: its receiver knew its sender better by then). Expect: nobody is told that it was
// refused, which would have all of it sent again under another epoch.
#[test]
fn what_is_taken_after_all_is_not_called_refused() {
    for refused_before in [false, true] {
        let mut pair = connected(Policy::default());
        pair.sides[1].endpoint.port_opened(PortId(6));
        submit(&mut pair, 6, Priority::Low, 100, 1);
        let bytes = frame(&mut pair).unwrap();
        let segments = [bytes.as_slice()];
        let parsed = wire::parse(&segments).unwrap();
        let (chunk, _) = parsed.chunks().next().unwrap();
        let Chunk::Eager { stream, .. } = chunk else {
            panic!("{chunk:?}")
        };
        let other = wire::StreamRef {
            epoch: stream.epoch.wrapping_sub(1),
            ..stream
        };
        let refused = if refused_before { stream } else { other };
        let side = &mut pair.sides[1];
        for slot in 0..side.endpoint.peers.end() {
            if let Some(entry) = side.endpoint.peers.get_mut(slot) {
                entry.reply(Reply::Refused(refused));
            }
        }
        let taken = side
            .endpoint
            .handle_frame(pair.now, &segments, &mut side.host);
        assert!(taken.is_ok());
        let told = (0..side.endpoint.peers.end()).filter_map(|slot| side.endpoint.peers.get(slot));
        let told = told.filter(|entry| entry.replies.contains(&Reply::Refused(refused)));
        assert_eq!(told.count(), usize::from(!refused_before));
    }
}
