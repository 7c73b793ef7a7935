//! Who waits costs no CPU.

use crate::support::service::{AWAIT_GATE, ECHO};
use crate::support::{block_on, cpu_time, everywhere, until, within_patience};
use std::sync::mpsc;
use std::time::Duration;

const IDLE: Duration = Duration::from_secs(1);

#[test]
fn idle_clients_and_servers_use_no_cpu() {
    everywhere(|world| {
        let served = world.serve();
        let rpc = world.rpc();
        let clients: Vec<_> = (0..3).map(|_| rpc.connect(&served.address).unwrap()).collect();
        clients.iter().for_each(|client| drop(client.call(ECHO).wait().unwrap()));
        // A thread, a task and a continuation that wait long.
        let thread = {
            let client = clients[0].clone();
            std::thread::spawn(move || client.call(AWAIT_GATE).wait().is_ok())
        };
        let task = {
            let client = clients[1].clone();
            std::thread::spawn(move || block_on(client.call(AWAIT_GATE).start()).is_ok())
        };
        let (done, continued) = mpsc::channel();
        clients[2].call(AWAIT_GATE).then(move |outcome| done.send(outcome.is_ok()).unwrap());
        until("all calls", || served.service.begun() == 3);
        std::thread::sleep(Duration::from_millis(300));
        let before = cpu_time();
        std::thread::sleep(IDLE);
        let used = cpu_time() - before;
        eprintln!("{used:?} of CPU in {IDLE:?}");
        assert!(used < IDLE / 100, "{used:?} of CPU in {IDLE:?}");
        served.service.gate.open();
        assert!(within_patience("the thread", move || thread.join().unwrap()));
        assert!(within_patience("the task", move || task.join().unwrap()));
        assert_eq!(continued.recv_timeout(crate::support::PATIENCE), Ok(true));
    });
}
