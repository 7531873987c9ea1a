//! Which address is ours when nobody says so.

use std::net::IpAddr;

use super::checker::Checker;
use super::file::File;
use crate::supervisor::surroundings::Interface;

/// The address of an interface that has but one of its kind; IPv4 before IPv6.
pub(super) fn only_address(
    checker: &mut Checker<'_>,
    file: &File,
    interface: &Interface,
) -> Option<IpAddr> {
    let (v4, v6): (Vec<IpAddr>, Vec<IpAddr>) = interface
        .addresses
        .iter()
        .partition(|address| address.is_ipv4());
    let link_local =
        |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let v6: Vec<IpAddr> = v6.into_iter().filter(|one| !link_local(one)).collect();
    let kind = if v4.is_empty() { v6 } else { v4 };
    if let [only] = kind[..] {
        return Some(only);
    }
    let there: Vec<String> = kind.iter().map(ToString::to_string).collect();
    let message = format!(
        "encap udp needs one address: interface `{}` has {}; name the one to use in network.address",
        file.network.interface.get_ref(),
        if there.is_empty() {
            "none (`ip addr add`)".to_owned()
        } else {
            there.join(", ")
        }
    );
    checker.complain(file.network.interface.span(), message);
    None
}
