//! The descriptors a daemon left with its manager, and the messages that brought them (sd_notify(3), systemd.service(5)
//! `FileDescriptorStoreMax=`).

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Longer than any message of ours.
const LONGEST: usize = 4096;
/// The longest name systemd takes.
const LONGEST_NAME: usize = 255;

/// One datagram.
pub(super) struct Message {
    pub from: Option<i32>,
    text: String,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// Is this line in it?
    pub fn is(&self, line: &str) -> bool {
        self.text.lines().any(|one| one == line)
    }

    fn value(&self, key: &str) -> Option<&str> {
        let mut lines = self.text.lines();
        lines.find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
    }
}

/// The next message that waits.
pub(super) fn receive(socket: &OwnedFd) -> Option<Message> {
    let mut bytes = [0; LONGEST];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253), ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let buffers = &mut [IoSliceMut::new(&mut bytes)];
    let length = recvmsg(socket, buffers, &mut control, flags).ok()?.bytes;
    let mut message = Message {
        from: None,
        text: String::from_utf8_lossy(bytes.get(..length)?).into_owned(),
        fds: Vec::new(),
    };
    for ancillary in control.drain() {
        match ancillary {
            RecvAncillaryMessage::ScmRights(fds) => message.fds.extend(fds),
            RecvAncillaryMessage::ScmCredentials(who) => {
                message.from = Some(who.pid.as_raw_pid());
            }
            _ => {}
        }
    }
    Some(message)
}

struct Entry {
    name: String,
    fd: OwnedFd,
    /// Dropped when it hangs up.
    polled: bool,
}

/// The store.
pub(super) struct Store {
    entries: Vec<Entry>,
    most: usize,
    pub refused: Vec<String>,
    pub hung_up: Vec<String>,
}

impl Store {
    pub fn new(most: usize) -> Self {
        Self {
            entries: Vec::new(),
            most,
            refused: Vec::new(),
            hung_up: Vec::new(),
        }
    }

    /// Does what a message says, if the main process sent it (`NotifyAccess=main`).
    pub fn hear(&mut self, message: Message, main: i32) {
        if message.from != Some(main) {
            return;
        }
        let name = message.value("FDNAME").unwrap_or("stored").to_owned();
        // systemd replaces a name it does not like.
        let name = match name.len() {
            1..=LONGEST_NAME if !name.contains(':') => name,
            _ => "stored".to_owned(),
        };
        if message.is("FDSTOREREMOVE=1") {
            self.entries.retain(|entry| entry.name != name);
        } else if message.is("FDSTORE=1") {
            let polled = !message.is("FDPOLL=0");
            for fd in message.fds {
                if self.entries.len() < self.most {
                    let name = name.clone();
                    self.entries.push(Entry { name, fd, polled });
                } else {
                    self.refused.push(name.clone());
                }
            }
        }
    }

    /// Drops what hung up and was not excepted from that.
    pub fn drop_hung_up(&mut self) {
        let now = Timespec::default();
        let hung_up = &mut self.hung_up;
        self.entries.retain(|entry| {
            if !entry.polled {
                return true;
            }
            let mut fds = [PollFd::new(&entry.fd, PollFlags::empty())];
            let dead = poll(&mut fds, Some(&now)).is_ok_and(|events| events > 0);
            if dead {
                hung_up.push(entry.name.clone());
            }
            !dead
        });
    }

    pub fn lose(&mut self, lost: impl Fn(&str) -> bool) -> usize {
        let before = self.entries.len();
        self.entries.retain(|entry| !lost(&entry.name));
        before - self.entries.len()
    }

    pub fn replace(&mut self, name: &str, fd: OwnedFd) -> Result<()> {
        let found = self.entries.iter_mut().find(|entry| entry.name == name);
        found
            .with_context(|| format!("nothing is stored as {name}"))?
            .fd = fd;
        Ok(())
    }

    pub fn names(&self) -> Vec<String> {
        self.entries
            .iter()
            .map(|entry| entry.name.clone())
            .collect()
    }

    pub fn copy(&self, name: &str) -> Result<OwnedFd> {
        let found = self.entries.iter().find(|entry| entry.name == name);
        let entry = found.with_context(|| format!("nothing is stored as {name}"))?;
        Ok(entry.fd.try_clone()?)
    }

    /// What the next start gets: names, and descriptors numbered `above` or more, so that they are out of the way.
    pub fn hand_out(&self, above: i32) -> Result<(Vec<String>, Vec<OwnedFd>)> {
        // Newest first: nobody may count on an order.
        let newest_first = || self.entries.iter().rev();
        let fds = newest_first()
            .map(|entry| rustix::io::fcntl_dupfd_cloexec(entry.fd.as_fd(), above))
            .collect::<Result<_, _>>()?;
        Ok((
            newest_first().map(|entry| entry.name.clone()).collect(),
            fds,
        ))
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};

    use super::*;

    const MAIN: i32 = 7;

    fn fd() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    fn message(text: &str, fds: Vec<OwnedFd>) -> Message {
        Message {
            from: Some(MAIN),
            text: text.to_owned(),
            fds,
        }
    }

    #[test]
    fn descriptors_are_kept_by_name_up_to_the_limit() {
        let mut store = Store::new(2);
        store.hear(message("FDSTORE=1\nFDNAME=a\nFDPOLL=0", vec![fd()]), MAIN);
        // Somebody else's is not kept.
        store.hear(message("FDSTORE=1\nFDNAME=x", vec![fd()]), MAIN + 1);
        store.hear(message("FDSTORE=1\nFDNAME=b", vec![fd(), fd()]), MAIN);
        assert_eq!(store.names(), ["a", "b"]);
        assert_eq!(store.refused, ["b"]);
        store.hear(message("FDSTOREREMOVE=1\nFDNAME=a", vec![]), MAIN);
        let (names, fds) = store.hand_out(100).unwrap();
        assert_eq!(names, ["b"]);
        assert_eq!(fds.len(), 1);
    }

    #[test]
    fn what_hangs_up_is_dropped_unless_it_said_otherwise() {
        let flags = SocketFlags::CLOEXEC;
        let pair = || socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let (kept, kept_end) = pair();
        let (lost, lost_end) = pair();
        let mut store = Store::new(9);
        store.hear(
            message("FDSTORE=1\nFDNAME=kept\nFDPOLL=0", vec![kept]),
            MAIN,
        );
        store.hear(message("FDSTORE=1\nFDNAME=lost", vec![lost]), MAIN);
        store.drop_hung_up();
        assert_eq!(store.names(), ["kept", "lost"]);
        // Closing would not do at once: a child that another test has just forked has copies until it executes something.
        for end in [kept_end, lost_end] {
            shutdown(end, Shutdown::Both).unwrap();
        }
        store.drop_hung_up();
        assert_eq!(store.names(), ["kept"]);
        assert_eq!(store.hung_up, ["lost"]);
    }
}
