//! A server on a port of its own, and clients of all manners.

use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};

use proptest::prelude::*;

use super::*;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(20);

struct Fixed(Vec<u8>);

impl Pages for Fixed {
    fn page(&mut self, format: Format, answered: &Answered) -> Vec<u8> {
        let mut page = format!("{format:?} {:?}\n", answered.0).into_bytes();
        if format == Format::Text {
            page.extend_from_slice(&self.0);
        }
        page
    }
}

struct Running {
    address: SocketAddr,
    parent: Option<UnixStream>,
    ended: Receiver<bool>,
}

fn start(page: Vec<u8>) -> Running {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), LONG).unwrap();
    let address = server.address().unwrap();
    let (parent, child) = UnixStream::pair().unwrap();
    let (tell, ended) = channel();
    std::thread::spawn(move || {
        let result = server.serve(&child, &mut Fixed(page));
        tell.send(result.is_ok())
    });
    Running {
        address,
        parent: Some(parent),
        ended,
    }
}

impl Running {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.set_write_timeout(Some(LONG)).unwrap();
        stream
    }

    fn ask(&self, request: &[u8]) -> String {
        let mut stream = self.connect();
        stream.write_all(request).unwrap();
        all(&mut stream)
    }

    fn still_serves(&self) {
        let answer = self.ask(b"GET /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The supervisor is gone: so is the exporter, at once and in good order.
        drop(self.parent.take());
        assert_eq!(self.ended.recv_timeout(LONG), Ok(true));
    }
}

/// Everything up to the end, or to a reset.
fn all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut space = [0; 65536];
    while let Ok(length @ 1..) = stream.read(&mut space) {
        bytes.extend_from_slice(&space[..length]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn the_page_is_served_in_both_formats() {
    let server = start(b"x 1\n".to_vec());
    let answer = server.ask(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(
        answer.contains("Content-Type: text/plain; version=0.0.4"),
        "{answer}"
    );
    assert!(
        answer.ends_with("\r\n\r\nText [1, 0, 0, 0, 0, 0, 0, 0]\nx 1\n"),
        "{answer}"
    );
    let answer = server
        .ask(b"GET /metrics?x=y HTTP/1.0\nACCEPT: application/openmetrics-text; version=1.0.0\n\n");
    assert!(
        answer.contains("Content-Type: application/openmetrics-text"),
        "{answer}"
    );
    let answer = server.ask(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.ends_with("\r\n\r\n"),
        "{answer}"
    );
}

#[test]
fn what_is_no_request_is_refused_by_name() {
    let server = start(Vec::new());
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", "404"),
        (b"GET http://other/metrics HTTP/1.1\r\n\r\n", "404"),
        (
            b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            "405",
        ),
        (b"get /metrics HTTP/1.1\r\n\r\n", "400"),
        (b"GET /metrics\r\n\r\n", "400"),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", "400"),
        (b"GET /metrics HTTP/2.0\r\n\r\n", "400"),
        (b"\r\n\r\n", "400"),
        (b"\x16\x03\x01\x02\x00\x01\xff\xfe\n\n", "400"),
    ] {
        let answer = server.ask(request);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request:?}: {answer}"
        );
    }
    let endless = [
        &b"GET /metrics HTTP/1.1\r\nX: "[..],
        &[b'a'; REQUEST_BYTES * 2],
    ]
    .concat();
    let mut stream = server.connect();
    // It may have closed by the time all is written.
    let _ = stream.write_all(&endless);
    assert!(all(&mut stream).starts_with("HTTP/1.1 431 "));
    server.still_serves();
}

// Connections that say nothing, or a letter now and then, hold every place. Expect: a scraper is served at once all the same, and they
// end within their deadline.
#[test]
fn the_slow_delay_nobody() {
    let server = start(Vec::new());
    let mut slow: Vec<TcpStream> = (0..CONNECTIONS * 3).map(|_| server.connect()).collect();
    for stream in &mut slow {
        let _ = stream.write_all(b"GET /met");
    }
    let begun = Instant::now();
    server.still_serves();
    assert!(begun.elapsed() < ASKS_WITHIN, "{:?}", begun.elapsed());
    for mut stream in slow {
        assert_eq!(all(&mut stream), "");
    }
    assert!(
        begun.elapsed() < ASKS_WITHIN + LONG / 2,
        "{:?}",
        begun.elapsed()
    );
}

// A client asks for a long page and does not take it. Expect: others are served meanwhile, and it is dropped in time.
#[test]
fn who_does_not_take_the_answer_is_dropped() {
    let server = start(vec![b'x'; 32 << 20]);
    let mut lazy = server.connect();
    lazy.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let answer = server.ask(b"GET / HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    let deadline = Instant::now() + LONG;
    let counts = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n";
    loop {
        let page = server.ask(counts);
        let too_slow = page.split(", ").nth(5).unwrap();
        if too_slow != "0" {
            break;
        }
        assert!(Instant::now() < deadline, "{page}");
    }
}

proptest! {
    // Any bytes, in any pieces. Expect: no panic, and an answer only to what has an end.
    #[test]
    fn any_bytes_are_judged(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let ends = |bytes: &[u8]| bytes.windows(2).any(|w| w == b"\n\n") || bytes.windows(4).any(|w| w == b"\r\n\r\n");
        prop_assert_eq!(read_head(&bytes).is_some(), ends(&bytes));
    }

    #[test]
    fn any_head_is_judged(head in "(GET|HEAD|POST|[a-z]{0,4}) ?/?(metrics)? ?(HTTP/1\\.[01])?(\r\n[ -~]{0,40}){0,4}") {
        judge(&head);
    }
}
