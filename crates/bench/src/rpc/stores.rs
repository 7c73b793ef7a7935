//! redis and memcached, asked by a client as simple as can be: one connection, calls that block, no library.

use super::Caller;
use crate::BenchError;
use crate::apps::servers::{App, Server, page, value_key};
use crate::folder::Folder;
use crate::launch::Way;
use crate::pair::PATIENCE;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};

/// A server that stores values, and the connection to it.
pub(super) struct Store {
    server: Server,
    talk: Talk<TcpStream>,
}

impl Store {
    /// Starts it on this CPU, with a value of each size.
    pub(super) fn start(app: App, cpu: usize, sizes: &[usize], folder: &mut Folder) -> Result<Store, BenchError> {
        let server = Server::start(app, Way::Plain, cpu, sizes, folder, None)?;
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Store { server, talk: Talk::new(app, stream) })
    }
}

impl Caller for Store {
    fn call(&mut self, count: usize, outstanding: usize) -> Result<(), BenchError> {
        self.talk.exchange(None, count, outstanding)
    }

    fn fetch(&mut self, size: usize, count: usize, outstanding: usize) -> Result<(), BenchError> {
        self.talk.exchange(Some(size), count, outstanding)
    }

    fn check(&mut self) -> Result<(), BenchError> {
        self.talk.check()
    }

    fn programs(&self) -> Vec<u32> {
        vec![self.server.id()]
    }
}

/// What is said over a connection.
struct Talk<S> {
    app: App,
    stream: BufReader<S>,
    /// What is asked for, if a value, and that request as often as it may be under way.
    asked: Option<Option<usize>>,
    requests: Vec<u8>,
    request_bytes: usize,
    /// How the answer to it begins.
    head: Vec<u8>,
    line: Vec<u8>,
    /// The value that arrived last.
    value: Vec<u8>,
}

impl<S: Read> Talk<S>
where
    for<'a> &'a S: Write,
{
    fn new(app: App, stream: S) -> Talk<S> {
        Talk {
            app,
            stream: BufReader::with_capacity(BUFFER_BYTES, stream),
            asked: None,
            requests: Vec::new(),
            request_bytes: 0,
            head: Vec::new(),
            line: Vec::new(),
            value: Vec::new(),
        }
    }

    /// Makes requests, no more than `outstanding` of which are unanswered at a time.
    fn exchange(&mut self, value: Option<usize>, count: usize, outstanding: usize) -> Result<(), BenchError> {
        self.make_requests(value, outstanding);
        let (mut sent, mut answered) = (0, 0);
        while answered < count {
            let due = count.min(answered + outstanding) - sent;
            if due > 0 {
                let requests = &self.requests[..due * self.request_bytes];
                self.stream.get_ref().write_all(requests)?;
                sent += due;
            }
            // One is waited for. What has come with it is taken too, so that the next requests go out together; but a
            // large value by itself takes longer than a request.
            loop {
                self.answer(value)?;
                answered += 1;
                if answered == sent || value.is_some() || !self.stream.buffer().contains(&b'\n') {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Only warming up, since the calls that are timed ask for the same.
    fn make_requests(&mut self, value: Option<usize>, outstanding: usize) {
        if self.asked != Some(value) {
            self.asked = Some(value);
            self.requests.clear();
            self.value.resize(value.unwrap_or(0), 0);
            let key = value_key(value.unwrap_or(0));
            self.head = match (self.app, value) {
                (App::Redis, None) => "+PONG\r\n".into(),
                (App::Redis, Some(size)) => format!("${size}\r\n").into(),
                (_, None) => "VERSION ".into(),
                (_, Some(size)) => format!("VALUE {key} 0 {size}\r\n").into(),
            };
        }
        let key = value_key(value.unwrap_or(0));
        let request = match (self.app, value) {
            (App::Redis, None) => "*1\r\n$4\r\nPING\r\n".to_owned(),
            (App::Redis, Some(_)) => format!("*2\r\n$3\r\nGET\r\n${}\r\n{key}\r\n", key.len()),
            (_, None) => "version\r\n".to_owned(),
            (_, Some(_)) => format!("get {key}\r\n"),
        };
        self.request_bytes = request.len();
        while self.requests.len() < outstanding * self.request_bytes {
            self.requests.extend_from_slice(request.as_bytes());
        }
    }

    /// Takes one answer.
    fn answer(&mut self, value: Option<usize>) -> Result<(), BenchError> {
        self.line.clear();
        self.stream.read_until(b'\n', &mut self.line)?;
        if !self.line.starts_with(&self.head) || !self.line.ends_with(b"\r\n") {
            return Err(self.misunderstood());
        }
        if value.is_none() {
            return Ok(());
        }
        self.stream.read_exact(&mut self.value)?;
        let end: &[u8] = if self.app == App::Redis { b"\r\n" } else { b"\r\nEND\r\n" };
        self.line.resize(end.len(), 0);
        self.stream.read_exact(&mut self.line)?;
        if self.line == end { Ok(()) } else { Err(self.misunderstood()) }
    }

    fn check(&self) -> Result<(), BenchError> {
        let expected = page(self.value.len());
        match self.value.iter().zip(&expected).position(|(found, expected)| found != expected) {
            Some(place) => Err(BenchError::Bytes { contestant: self.app.name(), place: place as u64 }),
            None => Ok(()),
        }
    }

    fn misunderstood(&self) -> BenchError {
        let why = format!("not understood: {:?}", String::from_utf8_lossy(&self.line));
        BenchError::Program { name: self.app.name(), why }
    }
}

/// What is read at a time, where it is not a large value.
const BUFFER_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::io;

    /// A server of one connection, which answers a whole write at once, and counts what is unanswered.
    #[derive(Default)]
    struct Scripted {
        answers: RefCell<VecDeque<u8>>,
        request: Vec<u8>,
        answer: Vec<u8>,
        most: RefCell<usize>,
    }

    impl Read for Scripted {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            let answers = self.answers.get_mut();
            // Whatever comes first: parts of answers too.
            let length = bytes.len().min(answers.len()).min(self.answer.len() + 3);
            for (byte, answer) in bytes.iter_mut().zip(answers.drain(..length)) {
                *byte = answer;
            }
            Ok(length)
        }
    }

    impl Write for &Scripted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            assert!(bytes.chunks(self.request.len()).all(|request| request == self.request), "{bytes:?}");
            let mut answers = self.answers.borrow_mut();
            for _ in bytes.chunks(self.request.len()) {
                answers.extend(&self.answer);
            }
            let unanswered = answers.len().div_ceil(self.answer.len());
            let mut most = self.most.borrow_mut();
            *most = unanswered.max(*most);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn talk(app: App, request: &str, answer: &str) -> Talk<Scripted> {
        Talk::new(app, Scripted { request: request.into(), answer: answer.into(), ..Scripted::default() })
    }

    #[test]
    fn calls_are_answered_however_many_are_under_way() {
        for outstanding in [1, 2, 7, 256] {
            let mut redis = talk(App::Redis, "*1\r\n$4\r\nPING\r\n", "+PONG\r\n");
            redis.exchange(None, 1000, outstanding).unwrap();
            let server = redis.stream.get_ref();
            assert!(server.answers.borrow().is_empty() && redis.stream.buffer().is_empty());
            assert_eq!(*server.most.borrow(), outstanding);
            let mut memcached = talk(App::Memcached, "version\r\n", "VERSION 1.6.18\r\n");
            memcached.exchange(None, 3, outstanding).unwrap();
            assert!(memcached.stream.get_ref().answers.borrow().is_empty());
        }
    }

    #[test]
    fn values_are_read_whole_and_compared() {
        let value = "abcdefgh";
        let mut redis = talk(App::Redis, "*2\r\n$3\r\nGET\r\n$7\r\nvalue:8\r\n", &format!("$8\r\n{value}\r\n"));
        redis.exchange(Some(8), 20, 4).unwrap();
        redis.check().unwrap();
        let answer = format!("VALUE value:8 0 8\r\n{value}\r\nEND\r\n");
        let mut memcached = talk(App::Memcached, "get value:8\r\n", &answer);
        memcached.exchange(Some(8), 20, 1).unwrap();
        memcached.check().unwrap();
        let mut wrong = talk(App::Memcached, "get value:8\r\n", &answer.replace('h', "x"));
        wrong.exchange(Some(8), 1, 1).unwrap();
        assert!(matches!(wrong.check(), Err(BenchError::Bytes { place: 7, .. })));
    }

    #[test]
    fn answers_that_are_not_understood_are_told() {
        let mut redis = talk(App::Redis, "*2\r\n$3\r\nGET\r\n$7\r\nvalue:8\r\n", "$-1\r\n");
        let said = redis.exchange(Some(8), 1, 1).unwrap_err().to_string();
        assert!(said.contains("redis-server") && said.contains("$-1"), "{said}");
        let mut memcached = talk(App::Memcached, "get value:8\r\n", "END\r\n");
        assert!(memcached.exchange(Some(8), 1, 1).is_err());
        let mut silent = talk(App::Memcached, "version\r\n", "");
        silent.stream.get_mut().answer = b"VERSION".to_vec();
        assert!(silent.exchange(None, 1, 1).is_err());
    }
}
