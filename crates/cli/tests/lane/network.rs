//! Network namespaces of a test's own, which need root: in each, a registry is that of the test alone.

use std::process::Command;

/// A network namespace with its loopback, taken down with this value. `ip netns` knows whose processes are in it.
pub struct Namespace {
    pub name: String,
}

impl Namespace {
    /// One of this process, under a name that no other of its tests uses at the same time.
    pub fn new(tag: &str) -> Namespace {
        let namespace = Namespace { name: format!("hwlane{}{tag}", std::process::id()) };
        ip(&["netns", "add", &namespace.name]);
        ip(&["-n", &namespace.name, "link", "set", "lo", "up"]);
        namespace
    }

    /// The same command, in this place.
    pub fn enter(&self, command: &Command) -> Command {
        let mut entered = Command::new("ip");
        entered.args(["netns", "exec", &self.name]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            entered.env(name, value.unwrap_or_default());
        }
        entered.current_dir("/");
        entered
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

/// Two namespaces and what joins them: the first is at 10.99.0.1, the second at 10.99.0.2.
pub fn joined() -> [Namespace; 2] {
    let both = ["a", "b"].map(Namespace::new);
    let [a, b] = both.each_ref().map(|namespace| namespace.name.as_str());
    ip(&["-n", a, "link", "add", "hwlane0", "type", "veth", "peer", "name", "hwlane1", "netns", b]);
    ip(&["-n", a, "address", "add", "10.99.0.1/24", "dev", "hwlane0"]);
    ip(&["-n", b, "address", "add", "10.99.0.2/24", "dev", "hwlane1"]);
    ip(&["-n", a, "link", "set", "hwlane0", "up"]);
    ip(&["-n", b, "link", "set", "hwlane1", "up"]);
    both
}

/// What `ip` says.
pub fn ip(arguments: &[&str]) -> String {
    let output =
        Command::new("ip").args(arguments).output().expect("ip is not installed (Debian: apt-get install iproute2)");
    assert!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}
