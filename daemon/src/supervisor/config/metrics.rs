//! `[metrics]`: where Prometheus finds us. Off unless it is written down: a daemon that opens a TCP port nobody asked for is a surprise, and
//! two daemons of one machine would want the same.

use std::net::SocketAddr;

use super::checker::Checker;
use super::file;

pub(super) fn listen(checker: &mut Checker<'_>, metrics: &file::Metrics) -> Option<SocketAddr> {
    let value = metrics.listen.as_ref()?;
    let text = value.get_ref();
    match text.parse::<SocketAddr>() {
        Ok(address) if address.port() >= 1024 => return Some(address),
        Ok(address) => {
            let port = address.port();
            let message = format!(
                "metrics.listen has port {port}, which an unprivileged process cannot have; give one from 1024 on, as 127.0.0.1:9464"
            );
            checker.complain(value.span(), message);
        }
        Err(_) => {
            let message = format!(
                "metrics.listen `{text}` is no address with a port; write it as 127.0.0.1:9464 or [::1]:9464"
            );
            checker.complain(value.span(), message);
        }
    }
    None
}
