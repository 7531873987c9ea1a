//! Answers to questions, as tokens.

use portolan_abi::token::Verdict as Wanted;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::host::Verdict;
use portolan_transport::ident::NodeId;
use portolan_transport::policy::Policy;

use super::super::counters::EngineCounters;
use super::super::{restore, serve};
use super::PORT;
use super::questions::Scene;

// Answers as an application gives them: one that nobody asked for, and one to an open question. Expect: the first ignored, the second taken,
// each counted, and both tokens come back.
#[test]
fn answers_to_no_question_are_counted() {
    let mut scene = Scene::new();
    let durable = restore::durable(&mut scene.host);
    let config = Config {
        node: NodeId(1),
        queue: 0,
        queues: 1,
        incarnation: 77,
        engine_epoch: 1,
        cluster: 5,
        name: "one".to_owned(),
        max_frame: 1458,
        max_peers: 2,
        first_number: 0,
        policy: Policy::default(),
    };
    let mut endpoint = Endpoint::restore(config, 1, &durable);
    let mut counters = EngineCounters::default();
    let answer = scene.answered(5, Wanted::Shorten, 7);
    for (slot, answers, ignored) in [(0, 0, 1), (1, 1, 1)] {
        scene.application.push(slot, &answer);
        let host = &mut scene.host;
        assert!(serve::serve_port(
            1,
            PORT,
            host,
            &mut endpoint,
            &mut counters
        ));
        assert_eq!(
            (counters.answers, counters.answers_ignored),
            (answers, ignored)
        );
        // The second time it is asked for.
        let asked = [Verdict::Undecided, Verdict::Shorten(7)][slot as usize];
        assert_eq!(scene.offer(5), asked);
    }
    scene.application.take_events();
    assert_eq!(scene.application.slots.map(|(_, out)| out), [false; 2]);
}
