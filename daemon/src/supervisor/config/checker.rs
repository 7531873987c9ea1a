//! What every check needs: complaints with their line, and the kinds of value that occur more than once.

use std::net::IpAddr;
use std::ops::{Range, RangeInclusive};
use std::path::Path;

use toml::{Spanned, Value};

use super::ConfigError;

/// Collects complaints and knows where the lines are.
pub(super) struct Checker<'a> {
    pub(super) file: &'a Path,
    pub(super) text: &'a str,
    pub(super) errors: Vec<ConfigError>,
}

impl Checker<'_> {
    pub(super) fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.as_bytes().get(..span.start).unwrap_or_default();
        1 + before.iter().filter(|byte| **byte == b'\n').count()
    }

    pub(super) fn complain(&mut self, span: Range<usize>, message: impl Into<String>) {
        let line = Some(self.line(&span));
        // One line, whatever a quoted value contains.
        let message: String = message
            .into()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ");
        self.errors.push(ConfigError {
            file: self.file.to_owned(),
            line,
            message,
        });
    }

    /// A number in its range; the default if it is missing or wrong.
    pub(super) fn number(
        &mut self,
        what: &str,
        value: Option<&Spanned<i64>>,
        range: RangeInclusive<i64>,
        default: i64,
    ) -> i64 {
        let Some(value) = value else {
            return default;
        };
        if range.contains(value.get_ref()) {
            return *value.get_ref();
        }
        let (low, high) = (range.start(), range.end());
        let message = format!("{what} is {}; it must be {low} to {high}", value.get_ref());
        self.complain(value.span(), message);
        default
    }

    pub(super) fn name(&mut self, what: &str, value: &Spanned<String>) -> String {
        let name = value.get_ref();
        let good = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        if name.is_empty() || name.len() > 63 || !name.chars().all(good) {
            let message = format!(
                "{what} `{name}` is no name; use 1 to 63 letters, digits, dots, dashes and underscores"
            );
            self.complain(value.span(), message);
        } else if name.bytes().all(|byte| byte.is_ascii_digit()) {
            let message = format!("{what} `{name}` reads as a node id; use a letter in it");
            self.complain(value.span(), message);
        }
        name.clone()
    }

    pub(super) fn address(&mut self, what: &str, value: &Spanned<String>) -> Option<IpAddr> {
        let text = value.get_ref();
        let message = match text.parse::<IpAddr>() {
            Ok(address) if address.is_unspecified() || address.is_multicast() => {
                format!("{what} {address} is no address of one node; give a unicast address")
            }
            Ok(IpAddr::V4(address)) if address.is_broadcast() => {
                format!("{what} {address} is no address of one node; give a unicast address")
            }
            Ok(address) => return Some(address),
            Err(_) => format!(
                "{what} `{text}` is no IPv4 or IPv6 address; give one without a port or prefix length"
            ),
        };
        self.complain(value.span(), message);
        None
    }

    pub(super) fn mac(&mut self, value: &Spanned<String>) -> Option<[u8; 6]> {
        let text = value.get_ref();
        match parse_mac(text) {
            Some(mac) if mac[0] & 1 == 0 && mac != [0; 6] => return Some(mac),
            Some(_) => {
                let message = format!(
                    "mac {text} is not one station's; give the unicast MAC of the peer's interface"
                );
                self.complain(value.span(), message);
            }
            None => {
                let message = format!("`{text}` is no MAC; write it as 02:00:00:00:00:01");
                self.complain(value.span(), message);
            }
        }
        None
    }
}

/// A name or number as text.
pub(super) fn as_name(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => u32::try_from(*number).ok().map(|n| n.to_string()),
        _ => None,
    }
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|part| part.len() == 2)?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}
