//! Limits of a node.

use crate::request::Refusal;

/// What a node allows. Times are nanoseconds.
#[derive(Clone, Debug)]
pub struct Config {
    /// Objects, those of others of which it has a copy included.
    pub objects_max: u64,
    /// Bytes of an object.
    pub object_bytes_max: u64,
    /// The shortest lease.
    pub lease_ns_min: u64,
    /// The longest lease.
    pub lease_ns_max: u64,
    /// Owners of paged regions.
    pub owners_max: u64,
    /// Pages that one request may take.
    pub take_max: u32,
    /// Changes of one bucket that may wait for nodes that follow.
    pub waiting_max: u32,
    /// Objects on their way to other nodes at once, when content moves.
    pub copying_max: u32,
    /// Names in an answer to a request for a list.
    pub list_max: u32,
    /// After which time a request to another node, or to the coordinator, is made again.
    pub retry_ns: u64,
    /// How long another node may not answer before the coordinator is told that nothing goes on.
    pub stall_ns: u64,
    /// How often what has ended is looked for.
    pub sweep_ns: u64,
    /// Free blocks of 128 KiB that keep their memory.
    pub keep_blocks: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            objects_max: 1 << 20,
            object_bytes_max: 64 << 20,
            lease_ns_min: 1_000_000,
            lease_ns_max: 30 * 24 * 3600 * 1_000_000_000,
            owners_max: 65_536,
            take_max: 65_536,
            waiting_max: 256,
            copying_max: 16,
            list_max: 4096,
            retry_ns: 100_000_000,
            stall_ns: 2_000_000_000,
            sweep_ns: 1_000_000_000,
            keep_blocks: 64,
        }
    }
}

impl Config {
    pub(crate) fn check_lease(&self, asked_ns: u64) -> Result<(), Refusal> {
        let (least_ns, most_ns) = (self.lease_ns_min, self.lease_ns_max);
        if (least_ns..=most_ns).contains(&asked_ns) {
            Ok(())
        } else {
            Err(Refusal::BadLease { asked_ns, least_ns, most_ns })
        }
    }
}
