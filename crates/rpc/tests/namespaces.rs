//! Calls between processes in namespaces of their own, as containers have them. Needs root, and `unshare` of util-linux.

use crate::support::service::{DIGEST, ECHO, ECHO_ON_POOL, FETCH, encoded};
use crate::support::{CONTAINER, Stage, Transport, World, block_on, buffer, buffer_of, content, is_root, until};
use highwire_rpc::{Client, ClientOptions};

const BYTES: u32 = 1 << 20;

fn calls(stage: &Stage) {
    let world = World { transport: Transport::Shared, stage };
    let rpc = world.rpc();
    let mut client = None;
    until("a server", || {
        client = rpc.connect_with("shm:calls", ClientOptions::default()).ok();
        client.is_some()
    });
    let client: Client = client.expect("just connected");
    let nic = client.rpc().nic().clone();
    for (seed, method) in [ECHO, ECHO_ON_POOL].into_iter().enumerate() {
        let arguments = content(seed as u64, 200);
        assert_eq!(client.call(method).arguments(&arguments).wait().unwrap().body.to_vec(), arguments);
        assert_eq!(block_on(client.call(method).arguments(&arguments).start()).unwrap().body.to_vec(), arguments);
    }
    client.call(DIGEST).payload(buffer_of(&nic, &content(1, BYTES as usize))).wait().unwrap();
    let into = buffer(&nic, BYTES as usize);
    let fetched = client.call(FETCH).arguments(&encoded(&(7u64, BYTES))).into(into).wait().unwrap();
    assert_eq!(fetched.payload.total(), u64::from(BYTES));
    stage.mark(&format!("called-{}", stage.argument()));
}

fn serves(stage: &Stage, until_called: &str) {
    let world = World { transport: Transport::Shared, stage };
    let rpc = world.rpc();
    let service = crate::support::service::Service::default();
    let _server = rpc.serve("shm:calls", service.services()).unwrap();
    stage.await_mark(until_called);
}

#[test]
fn calls_cross_namespaces_in_both_directions_and_between_two_containers() {
    let stage = Stage::open();
    stage.role("calls", calls);
    stage.role("serves", |stage| serves(stage, &stage.argument()));
    if !is_root("calls between namespaces") {
        return;
    }
    let client = stage.start_in(&CONTAINER, "calls", "from-container");
    serves(&stage, "called-from-container");
    client.finish();

    let server = stage.start_in(&CONTAINER, "serves", "called-");
    calls(&stage);
    server.finish();

    let server = stage.start_in(&CONTAINER, "serves", "called-between");
    stage.start_in(&CONTAINER, "calls", "between").finish();
    server.finish();
}
