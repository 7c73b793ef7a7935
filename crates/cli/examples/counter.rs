//! A service, and a call of it.

use highwire::Nic;
use highwire::rpc::{Rpc, Services, service};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

service! {
    /// Counts.
    pub trait Counter, client CounterClient, id 0x0c01_0001, version 1 {
        /// Adds, and tells the sum.
        [1, quick] fn add(&self, amount: u64) -> u64;
    }
}

struct Sum(AtomicU64);

impl Counter for Sum {
    fn add(&self, amount: u64) -> u64 {
        self.0.fetch_add(amount, Relaxed) + amount
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let nic = Nic::open()?;
    let rpc = Rpc::new(&nic)?;
    let _server = rpc.serve("shm:counter", Services::new().and(CounterClient::serve(Sum(AtomicU64::new(40)))))?;
    let counter = CounterClient::new(rpc.connect("shm:counter")?); // here in one process, or in another
    println!("{}", counter.add(2).wait()?);
    Ok(())
}
