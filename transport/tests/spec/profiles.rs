//! §12: the table of profiles is what the code says. transport.md §12

use portolan_transport::policy::{Ack, AckRule, OnTimeout, Order, Policy, Profile, Recovery};

/// A policy in the words of the table.
fn row(name: &str, policy: &Policy) -> [String; 6] {
    let recovery = match policy.recovery {
        Recovery::GoBackN { stall: true } => "go back N with Stall",
        Recovery::GoBackN { stall: false } => "go back N, NACK for each",
        Recovery::WholeMessage => "whole message",
        Recovery::Selective => "selective",
    };
    let ack = match policy.ack {
        Ack::Immediate => "at once".to_string(),
        Ack::Delayed { delay_us } => format!("delayed {delay_us} us"),
        Ack::Piggybacked { at_most_us } => format!("piggybacked {at_most_us} us"),
    };
    let rule = match policy.ack_rule {
        AckRule::Exact => ", exact",
        AckRule::Cumulative => "",
    };
    let order = match policy.order {
        Order::Number => "number",
        Order::Arrival => "arrival",
    };
    let timer = match policy.on_timeout {
        OnTimeout::Probe => "probe",
        OnTimeout::Resend => "data",
    };
    [
        format!("`{name}`"),
        policy.window_messages.to_string(),
        recovery.into(),
        ack + rule,
        order.into(),
        timer.into(),
    ]
}

#[test]
fn s12_the_profiles_are_what_the_table_says() {
    let spec = include_str!("../../../docs/spec/transport.md");
    for profile in Profile::ALL {
        let start = format!("| `{}` |", profile.name());
        let line = spec.lines().find(|line| line.starts_with(&start));
        let line = line.expect("a row for each profile");
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let expected = row(profile.name(), &profile.policy());
        assert_eq!(cells.len(), expected.len());
        for (cell, expected) in cells.iter().zip(&expected) {
            // The table adds remarks: "at once, cumulative; MSGEND", "at once, after the commit".
            assert!(cell.starts_with(expected.as_str()), "{line}: {expected}");
        }
    }
}
