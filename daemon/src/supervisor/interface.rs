//! What becomes of the interface a node lives on: the judgement. What is done about it is in `interface_events.rs`.
//!
//! **Problem.** People set interfaces down and up, change their MTU, take XDP programs off; virtual machines and drivers
//! delete an interface and make another of the same name. A socket of AF_XDP is bound to a queue of one *device*
//! (`NETDEV_UNREGISTER` unbinds it for good), the XDP link to its index, the program to its MAC, and frames longer than the MTU
//! are dropped without a word.
//!
//! **Idea.** Messages of rtnetlink only say *that* something happened. Then the interface is looked at as it is now (by name), and
//! the judgement is a function of that look and of what the node is made for; so messages may be lost, doubled or late. One thing
//! is not visible afterwards: that a link was removed although one of the same index is there again (it was moved to another
//! namespace and back); so a removal that was heard counts until everything is made anew.
//!
//! | the look | state | to do |
//! |---|---|---|
//! | no such interface | gone | |
//! | another index or MAC, or a removal was heard | gone | everything that is bound to it anew, once it is up |
//! | our program is not on it | stripped | put it on again |
//! | not up, without a carrier, or with an MTU below 576 | down | |
//! | else | up | |
//!
//! and, unless it is gone or that MTU is too small for anybody, an MTU other than the engines': new lives for them. What is to do is named at every look until it is done.
//!
//! **Rejected.** To go by the messages' contents: two states of truth, and the kernel sends none when an XDP link is detached
//! (`BPF_LINK_DETACH`), for which the interface is looked at once per second anyway.

use portolan_ebpf::AttachMode;

use super::netlink::Link;
use super::surroundings::Interface as Facts;

/// Nobody can do with less: what start-up asks for, too.
const LEAST_MTU: u16 = 576;

/// How the interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In order.
    Up,
    /// Set down, without a carrier, or with an MTU that is too small for us.
    Down,
    /// Our program is not on it, so no frame comes.
    Stripped,
    /// It is not there, or is another one for which nothing is made yet.
    Gone,
}

impl State {
    /// For people and scripts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
            Self::Stripped => "stripped",
            Self::Gone => "gone",
        }
    }
}

/// What one look shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// The interface of our name.
    pub link: Option<Link>,
    /// The index of the interface our program is on, 0 if it is on none; `None`: nobody knows.
    pub attached_to: Option<u32>,
    /// A removal of ours was heard since the last look.
    pub removed: bool,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Todo {
    /// Everything that is bound to the interface is to be made for this one.
    Rebuild(Link),
    /// The program is to be put on again.
    Attach,
    /// Engines are to be given this MTU.
    Mtu(u16),
}

/// The interface, as far as we know.
#[derive(Debug)]
pub struct Interface {
    state: State,
    /// What everything is bound to.
    index: u32,
    mac: [u8; 6],
    /// What memory is laid out for.
    longest: u16,
    /// What engines are told.
    mtu: u16,
    /// What everything was bound to does not exist any more.
    lost: bool,
    /// Sockets can be bound.
    set_up: bool,
    /// Where our program runs on it.
    xdp: Option<AttachMode>,
}

impl Interface {
    /// As it was when the node was made. `longest`: the MTU that memory is laid out for.
    pub fn new(facts: &Facts, longest: u16) -> Self {
        Self {
            state: State::Up,
            index: facts.index,
            mac: facts.mac,
            longest,
            mtu: longest,
            lost: false,
            set_up: true,
            xdp: None,
        }
    }

    /// How it is.
    pub fn state(&self) -> State {
        self.state
    }

    /// The MTU engines are told.
    pub fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Where our program runs, if it does.
    pub fn xdp(&self) -> Option<AttachMode> {
        self.xdp
    }

    /// Is nothing bound to it?
    pub fn is_gone(&self) -> bool {
        self.lost
    }

    /// Can sockets be bound to it?
    pub fn takes_sockets(&self) -> bool {
        !self.lost && self.set_up
    }

    /// Does a change of this link concern us?
    pub fn concerns(&self, index: u32, name: Option<&str>, ours: &str) -> bool {
        index == self.index || name == Some(ours)
    }

    /// Is this the index everything is bound to?
    pub fn is_at(&self, index: u32) -> bool {
        index == self.index
    }

    /// Judges a look: the state, and what is to be done now.
    pub fn judge(&mut self, look: &Look) -> Vec<Todo> {
        self.lost |= look.removed;
        self.xdp = None;
        let Some(link) = look.link else {
            self.lost = true;
            self.set_up = false;
            self.state = State::Gone;
            return Vec::new();
        };
        self.lost |= link.index != self.index || link.mac != self.mac;
        self.set_up = link.up;
        if self.lost {
            self.state = State::Gone;
            // Nothing can be bound to one that is down, and who makes one sets it up last.
            return if link.up {
                vec![Todo::Rebuild(link)]
            } else {
                Vec::new()
            };
        }
        let stripped = look.attached_to.is_some_and(|index| index != self.index);
        let carries = link.mtu >= u32::from(LEAST_MTU);
        self.state = match (stripped, link.up && link.carrier && carries) {
            (true, _) => State::Stripped,
            (false, true) => State::Up,
            (false, false) => State::Down,
        };
        let mut todo = Vec::new();
        if stripped {
            todo.push(Todo::Attach);
        } else {
            self.xdp = link.xdp;
        }
        let mtu = self.bounded(link.mtu);
        if mtu != self.mtu && carries {
            todo.push(Todo::Mtu(mtu));
        }
        todo
    }

    fn bounded(&self, mtu: u32) -> u16 {
        let mtu = u16::try_from(mtu).unwrap_or(u16::MAX);
        mtu.max(LEAST_MTU).min(self.longest)
    }

    /// Everything is bound to this one from now on.
    pub fn rebuilt(&mut self, link: &Link) {
        self.index = link.index;
        self.mac = link.mac;
        self.mtu = self.bounded(link.mtu);
        self.lost = false;
    }

    /// Engines are told this from now on.
    pub fn told(&mut self, mtu: u16) {
        self.mtu = mtu;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link {
        index: 7,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        up: true,
        carrier: true,
        program: Some(3),
        xdp: Some(AttachMode::Native),
        veth: false,
    };
    const FINE: Look = Look {
        link: Some(LINK),
        attached_to: Some(7),
        removed: false,
    };

    fn interface() -> Interface {
        let facts = Facts {
            index: 7,
            mac: LINK.mac,
            mtu: 1500,
            addresses: Vec::new(),
            rx_queues: None,
            veth: false,
        };
        Interface::new(&facts, 1500)
    }

    fn with(change: impl FnOnce(&mut Link)) -> Look {
        let mut link = LINK;
        change(&mut link);
        Look {
            link: Some(link),
            ..FINE
        }
    }

    fn judged(interface: &mut Interface, look: Look) -> (State, Vec<Todo>) {
        let todo = interface.judge(&look);
        (interface.state(), todo)
    }

    // Down by hand, down for want of a carrier, up again. Expect: the state says so, and there is nothing to do.
    #[test]
    fn down_and_up_ask_for_nothing() {
        let mut interface = interface();
        assert_eq!(judged(&mut interface, FINE), (State::Up, vec![]));
        let down = with(|link| (link.up, link.carrier) = (false, false));
        assert_eq!(judged(&mut interface, down), (State::Down, vec![]));
        assert!(!interface.takes_sockets() && !interface.is_gone());
        let pulled = with(|link| link.carrier = false);
        assert_eq!(judged(&mut interface, pulled), (State::Down, vec![]));
        assert!(interface.takes_sockets());
        assert_eq!(judged(&mut interface, FINE), (State::Up, vec![]));
    }

    // Every MTU there is. Expect: engines get it within what memory is laid out for and what start-up accepts; once told, no more.
    #[test]
    fn the_mtu_is_followed_within_bounds() {
        let mut interface = interface();
        for (mtu, told) in [
            (1400, 1400),
            (576, 576),
            (9000, 1500),
            (u32::MAX, 1500),
            (1499, 1499),
        ] {
            let look = with(|link| link.mtu = mtu);
            let todo = if interface.mtu() == told {
                vec![]
            } else {
                vec![Todo::Mtu(told)]
            };
            // Named until it is done.
            assert_eq!(judged(&mut interface, look), (State::Up, todo.clone()));
            assert_eq!(judged(&mut interface, look), (State::Up, todo));
            interface.told(told);
            assert_eq!(judged(&mut interface, look), (State::Up, vec![]));
        }
        // Too small for anybody: as good as down, and nothing is to be done about it.
        let look = with(|link| link.mtu = 575);
        assert_eq!(judged(&mut interface, look), (State::Down, vec![]));
    }

    // The program is off, or somewhere else, or nobody knows.
    #[test]
    fn a_program_that_is_off_is_put_on_again() {
        let mut interface = interface();
        assert_eq!(judged(&mut interface, FINE), (State::Up, vec![]));
        for attached in [0, 8] {
            let look = Look {
                attached_to: Some(attached),
                ..FINE
            };
            let expected = (State::Stripped, vec![Todo::Attach]);
            assert_eq!(judged(&mut interface, look), expected);
            // What runs there is not ours.
            assert_eq!(interface.xdp(), None);
        }
        let unknown = Look {
            attached_to: None,
            ..FINE
        };
        assert_eq!(judged(&mut interface, unknown), (State::Up, vec![]));
        assert_eq!(interface.xdp(), Some(AttachMode::Native));
    }

    // Gone, and back with another index, MAC and MTU: first down, then up. Expect: gone until everything is made anew, which is asked for
    // when it is up and until it is done.
    #[test]
    fn another_interface_of_the_same_name_is_built_upon() {
        let mut interface = interface();
        let none = Look {
            link: None,
            attached_to: Some(0),
            removed: true,
        };
        assert_eq!(judged(&mut interface, FINE), (State::Up, vec![]));
        assert_eq!(judged(&mut interface, none), (State::Gone, vec![]));
        assert!(interface.is_gone() && !interface.takes_sockets());
        assert_eq!(interface.xdp(), None);
        let mut link = Link {
            index: 9,
            mac: [2, 0, 0, 0, 0, 9],
            mtu: 1300,
            up: false,
            ..LINK
        };
        let look = |link| Look {
            link: Some(link),
            attached_to: Some(0),
            removed: false,
        };
        assert_eq!(judged(&mut interface, look(link)), (State::Gone, vec![]));
        link.up = true;
        for _ in 0..2 {
            let expected = (State::Gone, vec![Todo::Rebuild(link)]);
            assert_eq!(judged(&mut interface, look(link)), expected);
            assert!(!interface.takes_sockets());
        }
        interface.rebuilt(&link);
        let expected = (State::Stripped, vec![Todo::Attach]);
        assert_eq!(judged(&mut interface, look(link)), expected);
        let attached = Look {
            attached_to: Some(9),
            ..look(link)
        };
        assert_eq!(judged(&mut interface, attached), (State::Up, vec![]));
        assert_eq!(interface.mtu(), 1300);
        assert!(interface.takes_sockets());
    }

    // It was away and is there again with the same index when we look; or only its MAC is another.
    #[test]
    fn the_same_index_is_not_the_same_interface() {
        let mut interface = interface();
        let look = Look {
            removed: true,
            ..FINE
        };
        let expected = (State::Gone, vec![Todo::Rebuild(LINK)]);
        assert_eq!(judged(&mut interface, look), expected);
        // Heard once, it counts until it is done.
        assert_eq!(judged(&mut interface, FINE), expected);
        interface.rebuilt(&LINK);
        assert_eq!(judged(&mut interface, FINE), (State::Up, vec![]));

        let other = with(|link| link.mac = [2; 6]);
        let (state, todo) = judged(&mut interface, other);
        assert_eq!((state, todo.len()), (State::Gone, 1));
    }
}
