//! Two interfaces that reach each other, and streams between them.

use super::Stage;
use highwire_adapter::{UdpWire, WireConfig};
use highwire_link::Impairments;
use highwire_proto::{ClusterKey, Keys};
use highwire_sock::{Listener, SockConfig, Sockets, Strategy, Stream};
use highwire_vi::Nic;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where somebody listens, and somebody who calls.
pub struct Reach {
    pub here: Sockets,
    pub listener: Listener,
    /// What the one calls the other.
    pub address: String,
}

impl Reach {
    /// By memory that both map.
    pub fn on_one_host(stage: &Stage, config: SockConfig) -> Reach {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let address = format!("shm:reach-{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let nic = || Nic::with(stage.config()).expect("an interface");
        Reach::new([nic(), nic()], &address, config)
    }

    /// By packets over loopback, treated as `wire` says.
    pub fn by_wire(stage: &Stage, wire: &WireConfig, config: SockConfig) -> Reach {
        let nic = || wire_nic(stage, wire);
        Reach::new([nic(), nic()], "udp:127.0.0.1:0", config)
    }

    fn new(nics: [Nic; 2], address: &str, config: SockConfig) -> Reach {
        let [here, there] = nics.map(|nic| Sockets::with(&nic, config).expect("sockets"));
        let listener = there.bind(address).expect("a listener");
        let address = listener.local_addr().expect("where it listens").to_string();
        Reach { here, listener, address }
    }

    /// A new stream: the end that called, and the one that was called.
    pub fn pair(&self) -> [Stream; 2] {
        std::thread::scope(|scope| {
            let connected = scope.spawn(|| self.here.connect(&self.address).expect("a connection"));
            self.listener.set_nonblocking(true).expect("a listener that does not wait");
            let accepted = loop {
                match self.listener.accept() {
                    Ok((stream, _)) => break stream,
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                }
                assert!(!connected.is_finished(), "who connects has given up");
                let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
                poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 1_000_000 })).expect("a listener to wait for");
            };
            self.listener.set_nonblocking(false).expect("a listener that waits");
            [connected.join().expect("a connected stream"), accepted]
        })
    }
}

/// An interface that reaches other hosts.
pub fn wire_nic(stage: &Stage, wire: &WireConfig) -> Nic {
    Nic::with_wire(stage.config(), Arc::new(UdpWire::new(wire.clone()))).expect("an interface")
}

/// The same key for everybody.
pub fn sealed() -> Keys {
    Keys::new(ClusterKey::from_random([9; 32]))
}

/// Five in a hundred packets are lost, and as many overtaken or doubled.
pub fn bad_wire(keys: Keys) -> WireConfig {
    let bad = Impairments { loss: 0.05, reordering: 0.05, duplication: 0.05, ..Impairments::default() };
    WireConfig { keys, insecure: true, impairments: Some((bad, 7)), ..WireConfig::default() }
}

/// Every way of handling messages that come.
pub const STRATEGIES: [Strategy; 3] = [Strategy::Single, Strategy::Handler, Strategy::Notify];
