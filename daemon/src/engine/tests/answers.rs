//! Answers to questions, as tokens; tokens' turns.

use portolan_abi::token::Verdict as Wanted;
use portolan_transport::Endpoint;
use portolan_transport::endpoint::Config;
use portolan_transport::host::{Host, Verdict};
use portolan_transport::ident::{NodeId, PortId, Priority};
use portolan_transport::policy::Policy;

use super::super::counters::EngineCounters;
use super::super::{restore, serve};
use super::PORT;
use super::questions::Scene;

/// The transport of the scene's engine.
fn endpoint(scene: &mut Scene) -> Endpoint {
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
    Endpoint::restore(config, 1, &durable)
}

// Answers as an application gives them: one that nobody asked for, and one to an open question. Expect: the first ignored, the second taken,
// each counted, and both tokens come back.
#[test]
fn answers_to_no_question_are_counted() {
    let mut scene = Scene::new();
    let mut endpoint = endpoint(&mut scene);
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

// A buffer and an order in one turn. Expect: the buffer first while there is no other, so that what is sent to this node finds it; else behind the order,
// once that has been carried out; without an order at once.
#[test]
fn buffers_are_behind_orders_while_there_are_others() {
    let mut scene = Scene::new();
    let mut endpoint = endpoint(&mut scene);
    let mut counters = EngineCounters::default();
    let answer = scene.answered(5, Wanted::Shorten, 7);
    let mut serve = |scene: &mut Scene, later: bool| {
        let host = &mut scene.host;
        if later {
            serve::serve_buffers(1, PORT, host, &mut endpoint, &mut counters);
        } else {
            serve::serve_port(1, PORT, host, &mut endpoint, &mut counters);
        }
        (counters.receive_tokens, counters.answers_ignored)
    };
    scene.application.provide(0, 1);
    scene.application.push(0, &answer);
    assert_eq!(serve(&mut scene, false), (1, 1));
    scene.application.provide(1, 1);
    scene.application.push(1, &answer);
    assert_eq!(serve(&mut scene, false), (1, 2));
    assert_eq!(serve(&mut scene, true), (2, 2));
    assert_eq!(serve(&mut scene, true), (2, 2));
    let claimed = scene.host.claim(PortId(PORT), Priority::Low, 1);
    let slot = claimed.unwrap().slot;
    assert!(scene.host.port(PORT).buffers.consume(slot, 1));
    scene.application.provide(slot, 2);
    assert_eq!(serve(&mut scene, false), (3, 2));
}

// An application is asked about two messages and reads what it was asked. Expect: there is something unread from the first question until it has read both,
// which is what the engine gives its core away again for.
#[test]
fn events_are_unread_until_their_application_took_them() {
    let mut scene = Scene::new();
    assert!(!scene.host.ports.unread());
    for number in 0..2 {
        scene.offer(number);
        assert!(scene.host.ports.unread());
    }
    scene.application.take_events();
    assert!(!scene.host.ports.unread());
}
