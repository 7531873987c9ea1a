//! `[transport]`: profiles, single choices changed, and what cannot work.

use portolan_transport::policy::{OnTimeout, Policy, Profile};

use super::{GOOD, each_is_named, parse, with};

#[test]
fn the_transport_is_a_profile_and_what_of_it_is_changed() {
    assert_eq!(parse(GOOD).unwrap().policy, Policy::default());
    let section = |text: &str| parse(&with("[limits]", &format!("[transport]\n{text}\n[limits]")));
    for profile in Profile::ALL {
        let config = section(&format!("profile = \"{}\"", profile.name())).unwrap();
        assert_eq!(config.policy, profile.policy(), "{}", profile.name());
    }
    let config = section("profile = \"gamma\"\nwindow_messages = 128\non_timeout = \"probe\"");
    let expected = Policy {
        window_messages: 128,
        on_timeout: OnTimeout::Probe,
        ..Profile::Gamma.policy()
    };
    let config = config.unwrap();
    assert_eq!(config.policy, expected);
    // What the engine is told makes the same policy.
    assert_eq!(config.transport.policy(), Ok(expected));
    // A bound on the credit of all peers together makes it fit.
    let config = section("eager_buffers = 4000\neager_budget_buffers = 4000").unwrap();
    assert_eq!(config.policy.eager_buffers, 4000);
    assert!(section("eager_buffers = 4000").is_err());
}

#[test]
fn each_mistake_is_named_with_its_line_and_a_remedy() {
    each_is_named(&[
        (
            "[limits]",
            "[transport]\nprofile = \"tcp\"\n[limits]",
            "\"tcp\"",
            "transport.profile `tcp` is not known",
            "choose one of parastation2, rmpp, gamma, gbn-stall, ftgm, default",
        ),
        (
            "[limits]",
            "[transport]\nrecovery = \"selective\"\n[limits]",
            "recovery",
            "unknown field `recovery`",
            "remove it",
        ),
        (
            "[limits]",
            "[transport]\nprofile = \"gamma\"\nwindow_messages = 513\n[limits]",
            "window_messages",
            "transport.window_messages must be 1 to 512",
            "leave it to profile `gamma`",
        ),
        (
            "[limits]",
            "[transport]\nprofile = \"rmpp\"\nwindow_messages = 17\n[limits]",
            "window_messages",
            "must be at most 16 where messages commit in order of arrival",
            "correct it",
        ),
        (
            "[limits]",
            "[transport]\nack = \"piggybacked\"\nack_delay_us = 3000000\n[limits]",
            "ack_delay_us",
            "transport.ack must be delayed by less than rto_min_us",
            "correct it",
        ),
        (
            "[limits]",
            "[transport]\nack = \"never\"\n[limits]",
            "\"never\"",
            "unknown variant `never`",
            "choose one of those",
        ),
        (
            "[limits]",
            "[transport]\nrto_max_us = -1\n[limits]",
            "rto_max_us",
            "transport.rto_max_us is -1",
            "it must be 0 to",
        ),
        (
            "[limits]",
            "[transport]\nrto_min_us = 300000\nrto_max_us = 200000\n[limits]",
            "rto_max_us",
            "transport.rto_max_us must be at least rto_min_us",
            "correct it",
        ),
        (
            "[limits]",
            "[transport]\neager_buffers = 100000\n[limits]",
            "umem_frames",
            "the credit of all peers does not fit: 2 peers x (100000 eager",
            "set engine.umem_frames",
        ),
    ]);
}
