//! Messages of 64 bytes back and forth between two engines, one under way: what accept, transmit, receive, commit and complete cost.

use portolan_transport::policy::Profile;

use super::application::{Application, Message};
use super::{End, Engine, Memories, TakeOver};
use crate::engine::crossing::SLOT_BYTES;

/// Two engines and their applications.
pub struct PingPong<'m> {
    engines: [Engine; 2],
    ends: [End; 2],
    applications: [Application; 2],
    now: u64,
    buffer: Vec<u8>,
    _memories: &'m Memories,
}

const MESSAGE: Message = Message {
    len: 64,
    priority: 0,
    at: 0,
    timeout_us: 0,
};

impl<'m> PingPong<'m> {
    /// Of so many messages each way.
    pub fn new(memories: &'m Memories, messages: usize) -> Self {
        let script = vec![MESSAGE; messages];
        let both = [&memories.subject, &memories.peer];
        Self {
            engines: both.map(|memory| {
                memory.empty();
                let take_over = TakeOver {
                    port: Some(1),
                    now: 1,
                    policy: Profile::Default.policy(),
                };
                take_over.run(memory)
            }),
            ends: both.map(End::new),
            applications: both
                .map(|memory| Application::new(memory, 3 - memory.node(), &script, &script)),
            now: 1_000_000,
            buffer: vec![0; SLOT_BYTES],
            _memories: memories,
        }
    }

    /// Runs it: the second answers each message of the first.
    pub fn run(&mut self) {
        let messages = self.applications[0].script.len();
        let (mut asked, mut turns) = (0, 0);
        let is_done = |application: &Application| application.received.len() == messages;
        while !(self.applications.iter()).all(|a| is_done(a) && a.is_done()) {
            turns += 1;
            assert!(turns < 100 + 50 * messages, "nothing comes of it any more");
            for nth in [0, 1] {
                let received = self.applications[1 - nth].received.len();
                let answered = self.applications[nth].received.len();
                let application = &mut self.applications[nth];
                application.allowed = if nth == 0 { answered + 1 } else { answered };
                application.turn(self.now);
                asked = asked.max(received);
                self.engines[nth].turn(self.now);
                for _ in 0..self.ends[nth].from.available() {
                    let frame = self.ends[nth]
                        .from
                        .pop(&mut self.buffer)
                        .unwrap_or_default();
                    self.ends[1 - nth].to.push(&[frame]);
                }
            }
            self.now += 5_000;
        }
        let all = |application: &Application| application.received.len() == messages;
        assert!(self.applications.iter().all(all) && asked == messages);
    }
}
