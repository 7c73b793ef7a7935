//! One side of a measurement of another library, for `highwire bench --peers`, which starts two of these.
//!
//! ```text
//! highwire-peers lead|answer iceoryx2|iceoryx2-copied latency|bandwidth SIZE COUNT NAME
//! highwire-peers serve tonic|tarpc
//! highwire-peers call tonic|tarpc PORT
//! ```
//!
//! Of iceoryx2, the leading side prints the nanoseconds that COUNT messages (there and back, or one way and then
//! one acknowledgement) took. `iceoryx2` writes and reads the first line of each message where it is;
//! `iceoryx2-copied` copies all of it in and out. The others make remote procedure calls, for as long as there are lines
//! that say which: see [`rpc`].

mod rpc;

use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;
use iceoryx2::service::port_factory::PortFactory as _;
use iceoryx2::service::port_factory::publish_subscribe::PortFactory;
use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

type Service = ipc::Service;

fn main() -> ExitCode {
    set_log_level(LogLevel::Error);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match (Task::parse(&arguments), rpc::Side::parse(&arguments)) {
        (Some(task), _) => task.run(),
        (None, Some(side)) => side.run().map(|()| None),
        (None, None) => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(Some(took)) => {
            println!("{}", took.as_nanos());
            ExitCode::SUCCESS
        }
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("highwire-peers: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What is to be done.
#[derive(Debug)]
struct Task {
    leads: bool,
    copies: bool,
    ping_pong: bool,
    size: usize,
    count: usize,
    name: String,
}

impl Task {
    fn parse(arguments: &[String]) -> Option<Task> {
        let [role, contestant, exercise, size, count, name] = arguments else { return None };
        let one_of = |given: &str, yes: &str, no: &str| match given {
            _ if given == yes => Some(true),
            _ if given == no => Some(false),
            _ => None,
        };
        Some(Task {
            leads: one_of(role, "lead", "answer")?,
            copies: one_of(contestant, "iceoryx2-copied", "iceoryx2")?,
            ping_pong: one_of(exercise, "latency", "bandwidth")?,
            size: size.parse().ok().filter(|size| *size > 0)?,
            count: count.parse().ok()?,
            name: name.clone(),
        })
    }

    fn run(&self) -> Result<Option<Duration>, Box<dyn Error>> {
        let mut end = End::meet(self)?;
        let warm = self.count / 10 + 1;
        if !self.leads {
            self.answer(&mut end, warm)?;
            self.answer(&mut end, self.count)?;
            // Until the other side has read the last answer, its memory must stay.
            end.wait_for_the_other_to_leave();
            return Ok(None);
        }
        self.lead(&mut end, warm)?;
        let start = Instant::now();
        self.lead(&mut end, self.count)?;
        Ok(Some(start.elapsed()))
    }

    fn lead(&self, end: &mut End, count: usize) -> Result<(), Box<dyn Error>> {
        for _ in 0..count {
            end.send(self.size)?;
            if self.ping_pong {
                end.receive()?;
            }
        }
        if self.ping_pong { Ok(()) } else { end.receive() }
    }

    fn answer(&self, end: &mut End, count: usize) -> Result<(), Box<dyn Error>> {
        for _ in 0..count {
            end.receive()?;
            if self.ping_pong {
                end.send(self.size)?;
            }
        }
        if self.ping_pong { Ok(()) } else { end.send(1) }
    }
}

/// One side's two ports.
struct End {
    publisher: Publisher<Service, [u8], ()>,
    subscriber: Subscriber<Service, [u8], ()>,
    outgoing: PortFactory<Service, [u8], ()>,
    copies: bool,
    sent: Vec<u8>,
    received: Vec<u8>,
    _node: Node<Service>,
}

impl End {
    /// Opens both directions and waits until the other side has done so too.
    fn meet(task: &Task) -> Result<End, Box<dyn Error>> {
        let node = NodeBuilder::new().create::<Service>()?;
        let open = |direction: &str| -> Result<PortFactory<Service, [u8], ()>, Box<dyn Error>> {
            let name = format!("{}/{direction}", task.name);
            Ok(node
                .service_builder(&name.as_str().try_into()?)
                .publish_subscribe::<[u8]>()
                .enable_safe_overflow(false)
                .subscriber_max_buffer_size(BUFFER)
                .subscriber_max_borrowed_samples(2)
                .history_size(0)
                .open_or_create()?)
        };
        let (there, back) = (open("there")?, open("back")?);
        let (outgoing, incoming) = if task.leads { (there, back) } else { (back, there) };
        let subscriber = incoming.subscriber_builder().buffer_size(BUFFER).create()?;
        let publisher = outgoing
            .publisher_builder()
            .initial_max_slice_len(task.size)
            .max_loaned_samples(2)
            .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
            .create()?;
        let deadline = Instant::now() + PATIENCE;
        while outgoing.dynamic_config().number_of_subscribers() == 0
            || incoming.dynamic_config().number_of_publishers() == 0
        {
            if Instant::now() > deadline {
                return Err("the other side did not come".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(End {
            publisher,
            subscriber,
            outgoing,
            copies: task.copies,
            sent: vec![1; task.size],
            received: vec![0; task.size],
            _node: node,
        })
    }

    fn send(&mut self, size: usize) -> Result<(), Box<dyn Error>> {
        if self.publish(size)? == 1 {
            return Ok(());
        }
        // A subscriber is counted a moment before it is connected.
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if self.publish(size)? == 1 {
                return Ok(());
            }
        }
        Err("the other side was not connected".into())
    }

    /// Publishes one message; says how many subscribers have it.
    fn publish(&mut self, size: usize) -> Result<usize, Box<dyn Error>> {
        let mut sample = self.publisher.loan_slice_uninit(size)?;
        let sample = if self.copies {
            sample.write_from_slice(&self.sent[..size])
        } else {
            for byte in sample.payload_mut().iter_mut().take(LINE) {
                byte.write(2);
            }
            // SAFETY: bytes of shared memory, which the kernel zeroed, are valid whatever they are.
            unsafe { sample.assume_init() }
        };
        Ok(sample.send()?)
    }

    fn receive(&mut self) -> Result<(), Box<dyn Error>> {
        let mut looks: u32 = 0;
        let mut deadline = None;
        loop {
            if let Some(sample) = self.subscriber.receive()? {
                let payload = sample.payload();
                let read = if self.copies { payload.len() } else { payload.len().min(LINE) };
                self.received[..read].copy_from_slice(&payload[..read]);
                std::hint::black_box(&mut self.received);
                return Ok(());
            }
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1 << 16) {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
                if Instant::now() > deadline {
                    return Err("the other side stopped".into());
                }
            }
        }
    }

    fn wait_for_the_other_to_leave(&self) {
        let deadline = Instant::now() + PATIENCE;
        while self.outgoing.dynamic_config().number_of_subscribers() > 0 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

const USAGE: &str = "\
usage: highwire-peers lead|answer iceoryx2|iceoryx2-copied latency|bandwidth SIZE COUNT NAME
       highwire-peers serve tonic|tarpc
       highwire-peers call tonic|tarpc PORT";
const PATIENCE: Duration = Duration::from_secs(5);
const LINE: usize = 64;
/// Messages that may wait for the receiver: as many as a virtual interface has slots.
const BUFFER: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_read_or_refused() {
        let parse = |line: &str| Task::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let task = parse("lead iceoryx2-copied latency 4 100 name").unwrap();
        assert!(task.leads && task.copies && task.ping_pong && task.size == 4 && task.count == 100);
        let task = parse("answer iceoryx2 bandwidth 8192 5 name").unwrap();
        assert!(!task.leads && !task.copies && !task.ping_pong);
        for bad in ["lead", "follow iceoryx2 latency 4 1 n", "lead iceoryx2 latency 0 1 n", "lead x latency 4 1 n"] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }
}
