//! What a client costs its server in descriptors.

use crate::support::service::{ECHO, Service};
use crate::support::{PATIENCE, Stage, Transport, World, until};

fn descriptors_of(process: i32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).expect("the list of descriptors").count()
}

/// Those of a pair of processes, which are three; the memory of its receives, and that of its frames.
#[test]
fn a_client_in_another_process_costs_its_server_five_descriptors_until_it_goes() {
    const CLIENTS: usize = 10;
    let stage = Stage::open();
    stage.role("serves", |stage| {
        let world = World { transport: Transport::Shared, stage };
        let service = Service::default();
        let _server = world.rpc().serve("shm:calls", service.services()).unwrap();
        stage.mark("serves");
        std::thread::sleep(PATIENCE * 10);
    });
    let server = stage.start_with("serves", "");
    stage.await_mark("serves");
    let world = World { transport: Transport::Shared, stage: &stage };
    let connected = || {
        let client = world.client("shm:calls");
        client.call(ECHO).arguments(b"hello").wait().unwrap();
        client
    };
    // What the server has once for all of a user comes with the first.
    let first = connected();
    let before = descriptors_of(server.pid());
    let clients: Vec<_> = (0..CLIENTS).map(|_| connected()).collect();
    until("five for each", || descriptors_of(server.pid()) == before + 5 * CLIENTS);
    drop(clients);
    until("none for those that are gone", || descriptors_of(server.pid()) == before);
    drop(first);
}
