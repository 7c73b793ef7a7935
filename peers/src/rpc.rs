//! Both sides of remote procedure calls, for `highwire bench rpc --peers`.
//!
//! The side that serves prints its port, and serves until its standard input ends. The side that calls reads lines of
//! `SIZE OUTSTANDING COUNT`: it makes COUNT calls over one connection, with OUTSTANDING of them under way at a time, each
//! answered by SIZE bytes, and prints the nanoseconds that they took. Each side has one thread: the benchmark gives it
//! one CPU, and a second thread would only take turns with the first.

mod over_tarpc;
mod over_tonic;

use bytes::Bytes;
use std::error::Error;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;

/// What goes wrong.
pub(crate) type Failure = Box<dyn Error + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Library {
    Tonic,
    Tarpc,
}

/// One side of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Side {
    library: Library,
    /// Where to call; none for the side that serves.
    port: Option<u16>,
}

impl Side {
    pub(crate) fn parse(arguments: &[String]) -> Option<Side> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (name, port) = match words[..] {
            ["serve", name] => (name, None),
            ["call", name, port] => (name, Some(port.parse().ok()?)),
            _ => return None,
        };
        let library = match name {
            "tonic" => Library::Tonic,
            "tarpc" => Library::Tarpc,
            _ => return None,
        };
        Some(Side { library, port })
    }

    pub(crate) fn run(self) -> Result<(), Box<dyn Error>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let ran = runtime.block_on(async {
            match self.port {
                None => self.serve().await,
                Some(port) => self.call(port).await,
            }
        });
        ran.map_err(|failure| failure as Box<dyn Error>)
    }

    async fn serve(self) -> Result<(), Failure> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        say(&listener.local_addr()?.port().to_string())?;
        // Reading would hold up the only thread that serves.
        std::thread::spawn(|| {
            let _ = std::io::stdin().read(&mut [0]);
            std::process::exit(0);
        });
        let value = Bytes::from(value(VALUE_BYTES_MAX));
        match self.library {
            Library::Tonic => over_tonic::serve(listener, value).await,
            Library::Tarpc => over_tarpc::serve(listener, value).await,
        }
    }

    async fn call(self, port: u16) -> Result<(), Failure> {
        let caller = match self.library {
            Library::Tonic => Caller::Tonic(over_tonic::connect(port).await?),
            Library::Tarpc => Caller::Tarpc(over_tarpc::connect(port).await?),
        };
        say("connected")?;
        for line in std::io::stdin().lines() {
            let line = line?;
            let burst = Burst::parse(&line).ok_or_else(|| format!("not understood: {line:?}"))?;
            // A library may give up what it has not heard of for long, or have something left to do.
            tokio::task::yield_now().await;
            let took = burst.run(&caller).await?;
            say(&took.as_nanos().to_string())?;
        }
        Ok(())
    }
}

/// A connection, of which there may be several handles.
#[derive(Clone)]
enum Caller {
    Tonic(over_tonic::Client),
    Tarpc(over_tarpc::Client),
}

impl Caller {
    async fn fetch(&mut self, size: u32) -> Result<Bytes, Failure> {
        let value = match self {
            Caller::Tonic(client) => client.fetch(size).await?,
            Caller::Tarpc(client) => client.fetch(size).await?,
        };
        if value.len() == size as usize { Ok(value) } else { Err("the answer has another length".into()) }
    }
}

/// Calls that are timed together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Burst {
    size: u32,
    outstanding: usize,
    count: usize,
}

impl Burst {
    fn parse(line: &str) -> Option<Burst> {
        let numbers: Vec<usize> = line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [size, outstanding, count] = numbers[..] else { return None };
        let fits = size <= VALUE_BYTES_MAX && outstanding > 0 && count > 0;
        fits.then_some(Burst { size: u32::try_from(size).ok()?, outstanding, count })
    }

    async fn run(self, caller: &Caller) -> Result<Duration, Failure> {
        let clock = Instant::now();
        let last = if self.outstanding == 1 { self.one_by_one(caller).await? } else { self.at_once(caller).await? };
        let took = clock.elapsed();
        if last[..] != value(self.size as usize)[..] {
            return Err("the answer has other contents".into());
        }
        Ok(took)
    }

    async fn one_by_one(self, caller: &Caller) -> Result<Bytes, Failure> {
        let mut caller = caller.clone();
        let mut last = Bytes::new();
        for _ in 0..self.count {
            last = caller.fetch(self.size).await?;
        }
        Ok(last)
    }

    /// As many tasks as calls may be under way, each of which takes the next one from what is left.
    async fn at_once(self, caller: &Caller) -> Result<Bytes, Failure> {
        let left = Arc::new(AtomicUsize::new(self.count));
        let task = |_| {
            let (mut caller, left) = (caller.clone(), Arc::clone(&left));
            tokio::spawn(async move {
                let mut last = None;
                let next = || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
                while next().is_ok() {
                    last = Some(caller.fetch(self.size).await?);
                }
                Ok::<_, Failure>(last)
            })
        };
        let tasks: Vec<_> = (0..self.outstanding.min(self.count)).map(task).collect();
        let mut last = None;
        for task in tasks {
            last = task.await??.or(last);
        }
        last.ok_or_else(|| "nothing was called".into())
    }
}

/// A value of this size, as redis and memcached have it.
fn value(size: usize) -> Vec<u8> {
    (0..size).map(|place| b'a' + (place % 26) as u8).collect()
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// The largest value there is.
const VALUE_BYTES_MAX: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_and_bursts_are_read_or_refused() {
        let parse = |line: &str| Side::parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(parse("serve tonic"), Some(Side { library: Library::Tonic, port: None }));
        assert_eq!(parse("call tarpc 4000"), Some(Side { library: Library::Tarpc, port: Some(4000) }));
        for bad in ["serve", "serve grpc", "call tonic", "call tonic x", "serve tonic 1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(Burst::parse("8192 4 100"), Some(Burst { size: 8192, outstanding: 4, count: 100 }));
        for bad in ["", "1 2", "1 0 1", "1 1 0", "99999999 1 1", "a b c"] {
            assert_eq!(Burst::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn values_of_every_size_come_as_they_are() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            for library in [Library::Tonic, Library::Tarpc] {
                let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
                let port = listener.local_addr().unwrap().port();
                let served = Bytes::from(value(1 << 20));
                let caller = match library {
                    Library::Tonic => {
                        tokio::spawn(over_tonic::serve(listener, served));
                        Caller::Tonic(over_tonic::connect(port).await.unwrap())
                    }
                    Library::Tarpc => {
                        tokio::spawn(over_tarpc::serve(listener, served));
                        Caller::Tarpc(over_tarpc::connect(port).await.unwrap())
                    }
                };
                for (size, outstanding) in [(0, 1), (8192, 1), (1 << 20, 4), (0, 256)] {
                    Burst { size, outstanding, count: 300.min(outstanding * 2) }.run(&caller).await.unwrap();
                }
            }
        });
    }
}
