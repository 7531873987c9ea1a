//! The ports that an engine serves, by number and in turn.

use portolan_abi::PORTS;

use super::ports::Port;

/// The ports of an engine by number.
pub struct PortTable {
    ports: Vec<Option<Box<Port>>>,
    open: Vec<u16>,
}

impl Default for PortTable {
    fn default() -> Self {
        Self {
            ports: (0..PORTS).map(|_| None).collect(),
            open: Vec::with_capacity(usize::from(PORTS)),
        }
    }
}

impl PortTable {
    /// A port being served.
    #[inline]
    pub fn get(&self, port: u16) -> Option<&Port> {
        self.ports.get(usize::from(port))?.as_deref()
    }

    /// A port being served.
    #[inline]
    pub fn get_mut(&mut self, port: u16) -> Option<&mut Port> {
        self.ports.get_mut(usize::from(port))?.as_deref_mut()
    }

    /// Ports being served.
    pub fn count(&self) -> usize {
        self.open.len()
    }

    /// The `nth` port being served.
    pub fn number(&self, nth: usize) -> Option<u16> {
        self.open.get(nth).copied()
    }

    /// All ports being served.
    pub fn iter(&self) -> impl Iterator<Item = &Port> {
        self.open.iter().filter_map(|number| self.get(*number))
    }

    /// Is there an event that its application has not read?
    pub fn unread(&self) -> bool {
        self.iter()
            .any(|port| port.events_read() != port.events_published())
    }

    /// Is there an application that was given something and sleeps, or is likely to as soon as it has that?
    #[inline]
    pub fn sleepy(&self) -> bool {
        self.iter().any(Port::seems_sleepy)
    }

    /// Serves a port from now on.
    pub fn insert(&mut self, port: Port) {
        let number = port.number();
        if let Some(place) = self.ports.get_mut(usize::from(number)) {
            *place = Some(Box::new(port));
            if !self.open.contains(&number) {
                self.open.push(number);
            }
        }
    }

    /// Serves a port no longer.
    pub fn remove(&mut self, port: u16) -> Option<Box<Port>> {
        self.open.retain(|number| *number != port);
        self.ports.get_mut(usize::from(port))?.take()
    }
}
