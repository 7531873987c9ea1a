//! Applications in processes of their own: the test binary runs again as one of its ignored tests.
//!
//! Orders go in as lines; answers come out as lines of JSON behind a mark, past whatever the test runner prints. A worker whose
//! parent is gone ends.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

const VARIABLE: &str = "PORTOLAN_WORKER";
const MARK: &str = "@worker ";

/// A worker as its parent sees it. Dropping it kills it.
pub struct Worker {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    name: String,
}

impl Worker {
    /// Runs the ignored test `name` (`module::function`) of this binary in another process, with `arguments`.
    pub fn start(name: &str, arguments: &impl Serialize) -> Self {
        let binary = std::env::current_exe().unwrap();
        Self::start_command(Command::new(binary), name, arguments)
    }

    /// The same by a command that runs this binary, or a copy of it.
    pub fn start_command(mut command: Command, name: &str, arguments: &impl Serialize) -> Self {
        let mut child = command
            .args([
                "--exact",
                name,
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(VARIABLE, serde_json::to_string(arguments).unwrap())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, answers) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The runner prints the test's name without a line's end before the first mark.
                if let Some((_, answer)) = line.split_once(MARK)
                    && sender.send(answer.to_owned()).is_err()
                {
                    break;
                }
            }
        });
        Self {
            orders: child.stdin.take().unwrap(),
            child,
            answers,
            name: name.to_owned(),
        }
    }

    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    #[track_caller]
    pub fn answer<T: DeserializeOwned>(&self, within: Duration) -> T {
        let answer = self.answers.recv_timeout(within);
        let answer = answer.unwrap_or_else(|e| panic!("no answer of worker {}: {e}", self.name));
        serde_json::from_str(&answer).unwrap()
    }

    /// SIGKILL, now; it is reaped when dropped.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The parent as a worker sees it.
pub struct Parent {
    orders: Receiver<String>,
}

impl Parent {
    /// Waits for the next order.
    pub fn order(&self) -> String {
        self.orders.recv().unwrap()
    }

    pub fn answer(&self, answer: &impl Serialize) {
        let line = format!("{MARK}{}\n", serde_json::to_string(answer).unwrap());
        let mut out = std::io::stdout().lock();
        out.write_all(line.as_bytes()).unwrap();
        out.flush().unwrap();
    }
}

/// Does `job` if this process is a worker, and nothing if somebody just runs all ignored tests.
pub fn work<A: DeserializeOwned>(job: impl FnOnce(A, &Parent)) {
    let Some(arguments) = std::env::var_os(VARIABLE) else {
        return;
    };
    let arguments: Value = serde_json::from_str(arguments.to_str().unwrap()).unwrap();
    let (sender, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
        std::process::exit(3);
    });
    job(
        serde_json::from_value(arguments).unwrap(),
        &Parent { orders },
    );
}
