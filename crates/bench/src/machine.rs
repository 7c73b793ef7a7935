//! What a measurement ran on.

use serde::{Deserialize, Serialize};

/// The machine of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's model, as it calls itself.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The CPUs used, first the driver's, then the other process's.
    pub cpus_used: (usize, usize),
    /// Instruction set.
    pub architecture: String,
    /// Kernel release.
    pub kernel: String,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// True if the CPU says that it is a virtual one.
    pub virtual_machine: bool,
}

impl Machine {
    /// This machine.
    pub fn this(cpus: usize, cpus_used: (usize, usize)) -> Machine {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        Machine {
            cpu: cpu_model(&cpuinfo),
            cpus,
            cpus_used,
            architecture: std::env::consts::ARCH.to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            memory_bytes: kilobytes(&meminfo, "MemTotal:").unwrap_or(0) * 1024,
            virtual_machine: cpuinfo.lines().any(|line| line.starts_with("flags") && line.contains(" hypervisor")),
        }
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        format!(
            "{}{}, {} CPU{}, {:.0} GiB, Linux {} {}",
            self.cpu,
            if self.virtual_machine { " (virtual)" } else { "" },
            self.cpus,
            if self.cpus == 1 { "" } else { "s" },
            self.memory_bytes as f64 / f64::from(1 << 30),
            self.kernel,
            self.architecture
        )
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    // x86 has "model name", most Arm kernels only the part's number.
    ["model name", "Model", "CPU part"]
        .iter()
        .find_map(|key| {
            let line = cpuinfo.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .unwrap_or_else(|| "unknown CPU".to_owned())
}

/// The number behind `key` in one of the kernel's tables of kilobytes.
pub(crate) fn kilobytes(table: &str, key: &str) -> Option<u64> {
    let line = table.lines().find(|line| line.starts_with(key))?;
    line[key.len()..].split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_tables_are_read() {
        let table = "MemTotal:       24683628 kB\nMemFree:        23750000 kB\n";
        assert_eq!(kilobytes(table, "MemTotal:"), Some(24_683_628));
        assert_eq!(kilobytes(table, "SwapTotal:"), None);
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: AMD EPYC\n"), "AMD EPYC");
        assert_eq!(cpu_model(""), "unknown CPU");
    }
}
