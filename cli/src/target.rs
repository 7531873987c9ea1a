//! NODE or NODE:PORT.

use std::str::FromStr;

use portolan::{Address, Node, NodeError, PortId};

/// A target as it was typed; its port is `DEFAULT` if none was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetText<const DEFAULT: u16> {
    node: String,
    port: u16,
}

impl<const DEFAULT: u16> FromStr for TargetText<DEFAULT> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (node, port) = match text.rsplit_once(':') {
            None => (text, DEFAULT),
            Some((node, port)) => match port.parse() {
                Ok(port) if port < 256 => (node, port),
                _ => return Err(format!("{port:?} is no port: ports are 0 to 255")),
            },
        };
        if node.is_empty() {
            return Err("the node is missing".into());
        }
        Ok(Self {
            node: node.into(),
            port,
        })
    }
}

impl<const DEFAULT: u16> TargetText<DEFAULT> {
    /// The address it stands for, by the daemon's configuration.
    pub fn resolve(&self, node: &Node) -> Result<Address, NodeError> {
        Ok(Address {
            node: node.resolve(&self.node)?,
            port: PortId(self.port),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets() {
        let parse = |text: &str| text.parse::<TargetText<7>>();
        let is = |node: &str, port| {
            Ok(TargetText {
                node: node.into(),
                port,
            })
        };
        assert_eq!(parse("2"), is("2", 7));
        assert_eq!(parse("host-b:0"), is("host-b", 0));
        for bad in ["", ":1", "2:", "2:256", "2:x", "2:-1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
