//! Two hosts that are one: Nics that reach each other over loopback.

use highwire::{ClusterKey, Config, Driver, Keys, Nic, Vi, ViOptions, WireConfig};
use std::time::Duration;

pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn sealed() -> Keys {
    Keys::new(ClusterKey::from_random([9; 32]))
}

/// Every way of carrying, with and without a key.
pub fn wires() -> Vec<WireConfig> {
    let mut wires = Vec::new();
    for driver in [Driver::Thread, Driver::Caller] {
        for keys in [sealed(), Keys::insecure()] {
            wires.push(WireConfig { keys, driver, ..WireConfig::default() });
        }
    }
    wires
}

pub fn nic(wire: &WireConfig) -> Nic {
    Nic::with_wire(Config::default(), wire.clone()).unwrap()
}

/// The end that connects and the one that accepts at `address`, each with its Nic.
pub fn two_ends(wire: &WireConfig, address: &str, options: &ViOptions<'_>) -> [(Nic, Vi); 2] {
    let (caller, listening) = (nic(wire), nic(wire));
    let listener = listening.listen(address).unwrap();
    let to = listener.address().to_owned();
    let (here, there) = std::thread::scope(|scope| {
        let here = scope.spawn(|| caller.connect_with(&to, options).unwrap());
        let there = listener.accept_with(PATIENCE, options).unwrap();
        (here.join().unwrap(), there)
    });
    [(caller, here), (listening, there)]
}
