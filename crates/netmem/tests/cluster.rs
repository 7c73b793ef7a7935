//! Nodes, a coordinator and clients, by way of real calls.

use highwire_adapter::{UdpWire, WireConfig};
use highwire_netmem::map::{Bucket, Map, Member};
use highwire_netmem::request::{Expect, Refusal};
use highwire_netmem::{Keep, Memory, MemoryError, MemoryOptions, Name, NodeOptions, NodeServer, PagingOptions};
use highwire_proto::{ClusterKey, Keys};
use highwire_rpc::Rpc;
use highwire_vi::{Config, Nic};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// A place of its own for the names of one test.
struct Stage(TempDir);

impl Stage {
    fn new() -> Stage {
        Stage(tempfile::tempdir().unwrap())
    }

    /// An interface, as one process has it.
    fn rpc(&self) -> Rpc {
        let config = Config { runtime_dir: Some(self.0.path().to_owned()), ..Config::default() };
        let keys = Keys::new(ClusterKey::from_random([7; 32]));
        let wire = Arc::new(UdpWire::new(WireConfig { keys, ..WireConfig::default() }));
        Rpc::new(&Nic::with_wire(config, wire).unwrap()).unwrap()
    }

    fn node(&self, name: &str, bytes: u64, change: impl FnOnce(&mut NodeOptions)) -> NodeServer {
        let mut options = NodeOptions::new(bytes, &format!("shm:{name}"));
        change(&mut options);
        let node = NodeServer::start(&self.rpc(), options).unwrap();
        assert!(node.wait_until_in(Duration::from_secs(10)), "the coordinator lets nobody in");
        node
    }

    fn memory(&self, address: &str) -> Memory {
        Memory::connect(&self.rpc(), address, MemoryOptions::default()).unwrap()
    }
}

/// Waits until every node leads its part, and nothing is on its way.
fn settle(memory: &Memory, nodes: usize) {
    let leads = |map: &Map, node: &Member| {
        let leader = |bucket: &Bucket| bucket.owners.first().map(|owner| owner.incarnation);
        map.buckets.iter().any(|bucket| leader(bucket) == Some(node.incarnation))
    };
    wait_for_map(memory, nodes, |map| map.nodes.iter().all(|node| leads(map, node)));
}

/// Waits until there are so many nodes, nothing is on its way, and the map is as it should be.
fn wait_for_map(memory: &Memory, nodes: usize, is_right: impl Fn(&Map) -> bool) {
    let copies = |map: &Map| usize::from(map.copies).min(nodes);
    for _ in 0..2000 {
        let seen = memory.nodes().unwrap().len();
        let map = memory.map().unwrap();
        let whole =
            |bucket: &Bucket| bucket.owners.len() == copies(&map) && bucket.owners.iter().all(|owner| owner.full);
        if seen == nodes && is_right(&map) && map.buckets.iter().all(whole) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("the nodes do not settle");
}

fn content(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (seed.wrapping_mul(31).wrapping_add(at as u64 * 7) >> 2) as u8).collect()
}

const MIB: u64 = 1 << 20;

#[test]
fn objects_are_put_got_listed_renewed_and_removed() {
    let stage = Stage::new();
    let node = stage.node("one", 64 * MIB, |options| options.listen.push("udp:127.0.0.1:0".into()));
    for address in node.addresses() {
        let memory = stage.memory(address);
        for (seed, bytes) in [0, 1, 4095, 4096, 4097, 100_000, 5_000_000].into_iter().enumerate() {
            let (name, content) = (format!("{address} {bytes}"), content(seed as u64, bytes));
            let version = memory.put(&name, &content, Keep::default()).unwrap();
            for _ in 0..3 {
                assert!(memory.get(&name).unwrap() == content, "{name}");
            }
            let stat = memory.stat(&name).unwrap();
            assert_eq!((stat.length, stat.version, stat.pinned), (bytes as u64, version, false));
        }
        let listed = memory.list(address, |_, _| {}).unwrap();
        assert_eq!(listed.len(), 7);
        let name = format!("{address} 1");
        let version = memory.stat(&name).unwrap().version;
        let keep = Keep { only_if: Some(Expect::Absent), ..Keep::default() };
        let refused = memory.put(&name, b"other", keep).unwrap_err();
        assert!(matches!(refused.refusal(), Some(Refusal::Unexpected { found: Some(found) }) if *found == version));
        memory.renew(&name, Duration::from_secs(5)).unwrap();
        assert!(memory.stat(&name).unwrap().lease_left_ns <= 5_000_000_000);
        assert!(memory.remove(&name, None).unwrap());
        assert!(!memory.remove(&name, None).unwrap());
        let gone = memory.get(&name).unwrap_err();
        assert!(matches!(gone.refusal(), Some(Refusal::NotFound { lost: None })), "{gone}");
    }
}

#[test]
fn a_paged_region_is_read_and_written_beyond_its_budget() {
    let stage = Stage::new();
    let node = stage.node("one", 64 * MIB, |options| options.listen.push("udp:127.0.0.1:0".into()));
    for address in node.addresses() {
        let memory = stage.memory(address);
        let region = memory.paged_region(16 * MIB, PagingOptions::new(4 * MIB)).unwrap();
        let pieces = 16 * MIB / 65_536;
        for piece in 0..pieces {
            region.write_at(piece * 65_536, &content(piece, 65_536)).unwrap();
        }
        let mut back = vec![0; 65_536];
        for piece in 0..pieces {
            let piece = piece * 37 % pieces;
            region.read_at(piece * 65_536, &mut back).unwrap();
            assert!(back == content(piece, 65_536), "piece {piece} over {address}");
        }
        // The memory itself.
        let words = region.words();
        for page in 0..4096u64 {
            let at = (page * 1657 % 4096 * 4096) as usize;
            let expected = content(at as u64 / 65_536, 65_536)[at % 65_536];
            let word = words[at / 8].load(std::sync::atomic::Ordering::Relaxed);
            assert_eq!(word.to_ne_bytes()[0], expected, "{at} over {address}");
        }
        assert!(region.stats().fetched > 0 && node.figures().paged_pages > 0);
        drop(region);
        assert_eq!(node.figures().paged_pages, 0, "they are free again");
    }
}

#[test]
fn a_node_that_is_lost_takes_what_it_had_with_it_and_that_is_said() {
    let stage = Stage::new();
    let first = stage.node("first", 16 * MIB, |_| {});
    let second = stage.node("second", 16 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let memory = stage.memory("shm:first");
    settle(&memory, 2);
    let names: Vec<String> = (0..40).map(|number| format!("object {number}")).collect();
    for name in &names {
        memory.put(name, name.as_bytes(), Keep::default()).unwrap();
    }
    assert!(second.figures().objects > 0 && first.figures().objects > 0, "they are spread");
    let region = memory.paged_region(8 * MIB, PagingOptions::new(MIB)).unwrap();
    region.write_at(0, &vec![9; 8 * MIB as usize]).unwrap();
    region.flush().unwrap();
    drop(second);
    let (mut kept, mut lost) = (0, 0);
    for name in &names {
        match memory.get(name) {
            Ok(content) => {
                assert_eq!(content, name.as_bytes());
                kept += 1;
            }
            Err(error) => {
                assert!(matches!(error.refusal(), Some(Refusal::NotFound { lost: Some(_) })), "{error}");
                lost += 1;
            }
        }
    }
    assert!(kept > 0 && lost > 0, "{kept} kept, {lost} lost");
    let mut page = [0; 4096];
    let outcomes: Vec<_> = (0..2048).map(|at| region.read_at(at * 4096, &mut page)).collect();
    assert!(outcomes.iter().any(Result::is_ok) && outcomes.iter().any(Result::is_err));
}

#[test]
fn two_copies_survive_the_loss_of_a_node() {
    let stage = Stage::new();
    let _first = stage.node("first", 16 * MIB, |options| options.coordinating.copies = 2);
    let second = stage.node("second", 16 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let memory = stage.memory("shm:first");
    settle(&memory, 2);
    for number in 0..40 {
        memory.put(&format!("object {number}"), &content(number, 10_000), Keep::default()).unwrap();
    }
    drop(second);
    for number in 0..40 {
        assert!(memory.get(&format!("object {number}")).unwrap() == content(number, 10_000), "object {number}");
    }
}

#[test]
fn a_node_that_leaves_hands_its_objects_over() {
    let stage = Stage::new();
    let _first = stage.node("first", 16 * MIB, |_| {});
    let second = stage.node("second", 16 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let memory = stage.memory("shm:first");
    settle(&memory, 2);
    for number in 0..40 {
        memory.put(&format!("object {number}"), &content(number, 10_000), Keep::default()).unwrap();
    }
    assert!(second.figures().objects > 0);
    let report = second.leave(Duration::from_secs(10));
    assert!(report.handed_over && report.objects_lost == 0, "{report:?}");
    for number in 0..40 {
        assert!(memory.get(&format!("object {number}")).unwrap() == content(number, 10_000), "object {number}");
    }
}

#[test]
fn what_is_full_and_what_has_expired_is_said_to_be() {
    let stage = Stage::new();
    let _node = stage.node("one", MIB, |_| {});
    let memory = stage.memory("shm:one");
    let pinned = Keep { pinned: true, ..Keep::default() };
    memory.put("pinned", &content(1, 600 << 10), pinned).unwrap();
    let full = memory.put("more", &content(2, 600 << 10), pinned).unwrap_err();
    assert!(matches!(full.refusal(), Some(Refusal::Full { .. })), "{full}");
    // What may age gives way.
    memory.put("old", &content(3, 200 << 10), Keep::default()).unwrap();
    memory.put("new", &content(4, 300 << 10), Keep::default()).unwrap();
    assert!(matches!(memory.get("old").unwrap_err().refusal(), Some(Refusal::NotFound { .. })));
    assert!(memory.get("pinned").unwrap() == content(1, 600 << 10));
    let short = Keep { lease: Duration::from_millis(50), ..Keep::default() };
    memory.put("short", b"lived", short).unwrap();
    assert_eq!(memory.get("short").unwrap(), b"lived");
    std::thread::sleep(Duration::from_millis(80));
    let expired = memory.get("short").unwrap_err();
    assert!(matches!(expired.refusal(), Some(Refusal::Expired { .. } | Refusal::NotFound { .. })), "{expired}");
    let expired = memory.renew("short", Duration::from_secs(9)).unwrap_err();
    assert!(matches!(expired.refusal(), Some(Refusal::Expired { .. } | Refusal::NotFound { .. })), "{expired}");
}

#[test]
fn whoever_is_not_there_or_not_the_coordinator_is_named() {
    let stage = Stage::new();
    let _first = stage.node("first", MIB, |_| {});
    let _second = stage.node("second", MIB, |options| options.coordinator = Some("shm:first".into()));
    let rpc = stage.rpc();
    let nobody = Memory::connect(&rpc, "shm:nobody", MemoryOptions::default()).unwrap_err();
    assert!(matches!(nobody, MemoryError::NoCoordinator { .. }), "{nobody}");
    let wrong = Memory::connect(&rpc, "shm:second", MemoryOptions::default()).unwrap_err();
    assert!(matches!(wrong, MemoryError::NotCoordinator { .. }), "{wrong}");
}

#[test]
fn a_coordinator_that_starts_again_waits_unless_nobody_can_have_a_lease() {
    let stage = Stage::new();
    let start = |listen: &[&str]| {
        let mut options = NodeOptions::new(MIB, listen[0]);
        options.listen = listen.iter().map(|address| (*address).to_owned()).collect();
        NodeServer::start(&stage.rpc(), options).unwrap()
    };
    let mark = stage.0.path().join("first.coordinator");
    let first = start(&["shm:first"]);
    assert!(first.opens_in().is_zero() && first.wait_until_in(Duration::from_secs(10)) && mark.exists());
    let options = NodeOptions::new(MIB, "shm:first");
    let refused = NodeServer::start(&stage.rpc(), options).unwrap_err();
    assert!(refused.to_string().contains("in use") && mark.exists(), "{refused}");
    // Gone without a word: others may have a lease of it.
    drop(first);
    assert!(mark.exists());
    let again = start(&["shm:other", "shm:first"]);
    let opens_in = again.opens_in();
    assert!(opens_in > Duration::from_secs(2) && again.incarnation().is_none(), "it opens in {opens_in:?}");
    assert!(again.wait_until_in(opens_in + Duration::from_secs(5)));
    // In good order, but another node is there.
    let second = stage.node("second", MIB, |options| options.coordinator = Some("shm:first".into()));
    let report = again.leave(Duration::from_secs(10));
    assert!(report.nodes_orphaned == 1 && !report.handed_over && mark.exists(), "{report:?}");
    // The orphan has nobody to hand anything over to, and does not wait for ever.
    let began = std::time::Instant::now();
    assert!(!second.leave(Duration::from_secs(60)).handed_over);
    assert!(began.elapsed() < Duration::from_secs(30));
    let third = start(&["shm:first"]);
    assert!(!third.opens_in().is_zero());
    // In good order, and alone.
    third.leave(Duration::from_secs(10));
    assert!(!mark.exists());
    assert!(start(&["shm:first"]).opens_in().is_zero());
}

#[test]
fn objects_that_no_other_node_has_room_for_are_said_to_be_lost() {
    let stage = Stage::new();
    let _first = stage.node("first", MIB, |_| {});
    let second = stage.node("second", 16 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let memory = stage.memory("shm:first");
    settle(&memory, 2);
    let keep = Keep { pinned: true, ..Keep::default() };
    let mut stored = 0;
    for number in 0..40 {
        stored += u64::from(memory.put(&format!("object {number}"), &content(number, 100_000), keep).is_ok());
    }
    let report = second.leave(Duration::from_secs(20));
    assert!(report.handed_over && report.objects_lost > 0, "{report:?}");
    let found = (0..40).filter(|number| memory.get(&format!("object {number}")).is_ok()).count() as u64;
    assert_eq!(found + report.objects_lost, stored, "{report:?}");
}

#[test]
fn a_node_is_refused_an_address_that_means_another_host_to_others() {
    let stage = Stage::new();
    for address in ["udp:0.0.0.0:0", "udp:[::]:7411"] {
        let refused = NodeServer::start(&stage.rpc(), NodeOptions::new(MIB, address)).unwrap_err();
        assert!(refused.to_string().contains("the address of this host"), "{refused}");
    }
}

#[test]
fn an_object_that_is_too_large_is_refused_before_anything_is_sent() {
    let stage = Stage::new();
    let node = stage.node("one", 256 * MIB, |options| options.listen.push("udp:127.0.0.1:0".into()));
    for address in node.addresses() {
        let memory = stage.memory(address);
        let refused = memory.put("large", &vec![1; (64 << 20) + 1], Keep::default()).unwrap_err();
        assert!(matches!(refused.refusal(), Some(Refusal::TooLarge { .. })), "{refused}");
        let largest = vec![2; 64 << 20];
        memory.put("largest", &largest, Keep::default()).unwrap();
        assert!(memory.get("largest").unwrap() == largest, "over {address}");
    }
}

#[test]
fn a_node_keeps_its_lease_while_a_large_object_comes() {
    let stage = Stage::new();
    let node = stage.node("one", 256 * MIB, |options| {
        options.coordinating.lease_ns = 500_000_000;
        options.coordinating.margin_ns = 100_000_000;
        options.node.object_bytes_max = 512 * MIB;
        options.server.request_bytes_max = 512 << 20;
    });
    let life = node.incarnation();
    let memory = stage.memory("shm:one");
    memory.put("small", b"stays", Keep::default()).unwrap();
    // Without optimisation it takes the node several leases to have it in its pages.
    let large = vec![7; 240 << 20];
    memory.put("large", &large, Keep::default()).unwrap();
    assert_eq!(node.incarnation(), life, "it has begun another life");
    assert_eq!(memory.get("small").unwrap(), b"stays");
    assert!(memory.get("large").unwrap() == large);
    // Refused, it leaves nothing behind.
    let (free, absent) = (node.figures().free_pages, Keep { only_if: Some(Expect::Absent), ..Keep::default() });
    let refused = memory.put("large", &large[..10 << 20], absent).unwrap_err();
    assert!(matches!(refused.refusal(), Some(Refusal::Unexpected { .. })), "{refused}");
    let pinned = Keep { pinned: true, ..Keep::default() };
    let full = memory.put("other", &vec![1; 257 << 20], pinned).unwrap_err();
    assert!(matches!(full.refusal(), Some(Refusal::Full { .. })), "{full}");
    assert_eq!(node.figures().free_pages, free);
}

/// Names of objects whose bucket this node leads.
fn names_led_by(memory: &Memory, node: &NodeServer, prefix: &str, count: usize) -> Vec<String> {
    let map = memory.map().unwrap();
    let led = |name: &String| {
        let bucket = map.bucket_of(&Name::new(name).unwrap());
        map.leader(bucket).is_some_and(|leader| Some(leader.incarnation) == node.incarnation())
    };
    (0..).map(|number| format!("{prefix} {number}")).filter(led).take(count).collect()
}

#[test]
fn objects_that_their_node_has_no_room_for_are_stored_at_another_and_stay_when_nodes_come_and_leave() {
    let stage = Stage::new();
    let first = stage.node("first", 4 * MIB, |_| {});
    let second = stage.node("second", 64 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let memory = stage.memory("shm:first");
    settle(&memory, 2);
    let pinned = Keep { pinned: true, ..Keep::default() };
    let mut contents = Vec::new();
    for (seed, name) in names_led_by(&memory, &first, "filling", 15).into_iter().enumerate() {
        contents.push((name, content(seed as u64, 256 << 10)));
        memory.put(&contents[seed].0, &contents[seed].1, pinned).unwrap();
    }
    assert_eq!(first.figures().free_pages, 64, "the first node is nearly full");
    // One of them comes to the node piece by piece, one in place of another content, the others in one request.
    let mut names = names_led_by(&memory, &first, "more", 12);
    names.push(contents[3].0.clone());
    for (seed, name) in names.into_iter().enumerate() {
        let bytes = content(100 + seed as u64, if seed == 5 { 5 << 20 } else { 300 << 10 });
        memory.put(&name, &bytes, pinned).unwrap();
        contents.retain(|(other, _)| *other != name);
        contents.push((name, bytes));
    }
    let read = |contents: &[(String, Vec<u8>)]| {
        for options in [true, false].map(|one_sided| MemoryOptions { one_sided, ..MemoryOptions::default() }) {
            let memory = Memory::connect(&stage.rpc(), "shm:first", options).unwrap();
            for (name, bytes) in contents {
                assert!(memory.get(name).unwrap() == *bytes, "{name}");
            }
        }
    };
    read(&contents);
    assert!(first.figures().dropped == 0 && second.figures().dropped == 0);
    // What no node has room for is refused as ever.
    let name = names_led_by(&memory, &second, "most", 1).remove(0);
    let full = memory.put(&name, &vec![1; 62 << 20], pinned).unwrap_err();
    assert!(matches!(full.refusal(), Some(Refusal::Full { .. })), "{full}");
    // They go on to the node that has room, and not to the one where their names would be by themselves.
    let _third = stage.node("third", 64 * MIB, |options| options.coordinator = Some("shm:first".into()));
    settle(&memory, 3);
    read(&contents);
    let report = second.leave(Duration::from_secs(20));
    assert!(report.handed_over, "{report:?}");
    let moved = &contents[14..];
    read(moved);
}

#[test]
fn two_copies_are_stored_while_two_nodes_have_room() {
    let stage = Stage::new();
    let first = stage.node("first", MIB, |options| options.coordinating.copies = 2);
    let join = |name: &str| stage.node(name, 64 * MIB, |options| options.coordinator = Some("shm:first".into()));
    let (second, third) = (join("second"), join("third"));
    let memory = stage.memory("shm:first");
    settle(&memory, 3);
    let pinned = Keep { pinned: true, ..Keep::default() };
    // The small node leads some of them, and follows in others.
    let names = [&first, &second, &third].map(|node| names_led_by(&memory, node, "object", 8)).concat();
    for (seed, name) in names.iter().enumerate() {
        memory.put(name, &content(seed as u64, 200 << 10), pinned).unwrap();
    }
    // There are two copies when nothing is on its way any more.
    wait_for_map(&memory, 3, |_| true);
    drop(second);
    for (seed, name) in names.iter().enumerate() {
        assert!(memory.get(name).unwrap() == content(seed as u64, 200 << 10), "{name}");
    }
}
