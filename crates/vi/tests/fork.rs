//! A forked child has its parent's memory and none of its rights: whatever it does is a typed
//! error, and the parent does not notice.

use crate::support::forked::in_child;
use crate::support::seeded::{bytes, verify};
use crate::support::{A_WHILE, Line, PATIENCE, Stage, both_ends, buffer, buffer_of};
use highwire_vi::{
    AcceptError, Armed, Background, CompletionQueue, ConnectError, Failure, InPlace, ListenError, Message, Nic, Path,
    PayloadToken, PostError, RdmaRead, RdmaWrite, Receive, RemoteKey, Tag, ViOptions, WaitError,
};
use std::time::Duration;

/// Two ends, and what a child could do harm with.
struct Scene {
    stage: Stage,
    one: Nic,
    other: Nic,
    near: Line,
    far: Line,
}

impl Scene {
    fn new() -> Scene {
        let stage = Stage::open();
        let (one, other) = (stage.nic(), stage.nic());
        let (near, far) = both_ends(&one, &other, &ViOptions::new(), &ViOptions::new());
        Scene { stage, one, other, near, far }
    }

    /// Messages still go both ways, by every path.
    fn still_works(&mut self) {
        let ends = [(&self.one, &mut self.near), (&self.other, &mut self.far)];
        let [(one, near), (other, far)] = ends;
        there_and_back(one, near, other, far);
        there_and_back(other, far, one, near);
    }
}

fn there_and_back(from: &Nic, sender: &mut Line, to: &Nic, receiver: &mut Line) {
    for (seed, path) in [Path::Choose, Path::Buffered, Path::Referenced].into_iter().enumerate() {
        let size = [100, 9000, 60_000][seed];
        sender.vi.post_send(Message::new(9).payload(buffer_of(from, &bytes(seed as u64, size))).by(path)).unwrap();
        receiver.vi.post_recv(Receive::new(8).into(buffer(to, size))).unwrap();
        verify(seed as u64, &receiver.received().into_buffer().unwrap());
        receiver.vi.poll();
        sender.sent();
    }
}

#[test]
fn every_use_in_a_forked_child_is_a_typed_error() {
    let scene = Scene::new();
    let listener = scene.one.listen("shm:parents").unwrap();
    let exported = scene.other.export(4096, Tag(0)).unwrap();
    let key = scene.far.vi.grant_exported(&exported).unwrap();
    let queue = scene.one.completion_queue().unwrap();
    let (mut scene, ..) = in_child((scene, listener, queue), |(scene, listener, queue)| {
        child_uses_everything(scene, &listener, key, queue);
    });
    scene.still_works();
}

fn child_uses_everything(
    mut scene: Scene,
    listener: &highwire_vi::ViListener,
    key: RemoteKey,
    mut queue: CompletionQueue,
) {
    let (nic, vi) = (&scene.one, &mut scene.near.vi);
    let listened = nic.listen("shm:child").unwrap_err();
    assert!(matches!(listened, ListenError::ForkedChild) && listened.to_string().contains("child"), "{listened}");
    let connected = nic.connect("shm:parents").unwrap_err();
    assert!(matches!(connected, ConnectError::ForkedChild), "{connected}");
    let accepted = listener.accept(Duration::ZERO).unwrap_err();
    assert!(matches!(accepted, AcceptError::ForkedChild), "{accepted}");
    let place = || buffer(nic, 64);
    assert_eq!(vi.post_send(Message::new(1).payload(place())).unwrap_err().reason, PostError::ForkedChild);
    let large = Message::new(1).payload(buffer(nic, 50_000)).by(Path::Referenced);
    assert_eq!(vi.post_send(large).unwrap_err().reason, PostError::ForkedChild);
    assert_eq!(vi.send_bytes(1, b"x"), Err(PostError::ForkedChild));
    assert_eq!(vi.post_recv(Receive::new(1).into(place())).unwrap_err().reason, PostError::ForkedChild);
    assert_eq!(vi.expect(PayloadToken(1), Receive::new(1)).unwrap_err().reason, PostError::ForkedChild);
    let write = RdmaWrite::new(1, key, 0).payload(place()).immediate(1);
    assert_eq!(vi.rdma_write(write).unwrap_err().reason, PostError::ForkedChild);
    assert_eq!(vi.rdma_read(RdmaRead::new(1, key, 0, place())).unwrap_err().reason, PostError::ForkedChild);
    assert!(vi.poll().is_none());
    assert_eq!(vi.wait(PATIENCE).unwrap_err(), WaitError::ForkedChild);
    assert_eq!(vi.sender().wait(PATIENCE).unwrap_err(), WaitError::ForkedChild);
    assert_eq!(vi.sender().flush(PATIENCE).unwrap_err(), WaitError::ForkedChild);
    assert_eq!(vi.receiver().wait(PATIENCE).unwrap_err(), WaitError::ForkedChild);
    assert_eq!(queue.wait(PATIENCE).unwrap_err(), WaitError::ForkedChild);
    assert_eq!(queue.poll(), None);
    assert_eq!(scene.near.vi.disconnect(PATIENCE).unwrap_err(), WaitError::ForkedChild);
}

#[test]
fn a_grant_in_a_forked_child_is_refused_and_nothing_is_sent() {
    let scene = Scene::new();
    let mut scene = in_child(scene, |scene| {
        let region = scene.one.register(4096).unwrap();
        let granted = scene.near.vi.grant(&region);
        assert!(granted.is_err(), "{granted:?}");
        let exported = scene.one.export(4096, Tag(0)).unwrap();
        let granted = scene.near.vi.grant_exported(&exported);
        assert!(granted.is_err(), "{granted:?}");
    });
    scene.still_works();
}

#[test]
fn a_child_that_drops_everything_takes_nothing_from_its_parent() {
    let scene = Scene::new();
    let listener = scene.one.listen("shm:parents").unwrap();
    let mut queue = scene.one.completion_queue().unwrap();
    queue.descriptor().unwrap();
    let (mut scene, listener, queue) = in_child((scene, listener, queue), |(scene, listener, queue)| {
        drop((listener, queue, scene.near, scene.far, scene.one, scene.other));
    });
    scene.still_works();
    assert!(matches!(scene.one.listen("shm:parents"), Err(ListenError::InUse { .. })), "the name is the parent's");
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| Line::connect(&scene.other, "shm:parents"));
        let mut accepted = Line::accept(&listener);
        let mut connected = connecting.join().unwrap();
        there_and_back(&scene.other, &mut connected, &scene.one, &mut accepted);
    });
    drop(queue);
    assert!(matches!(scene.near.vi.wait(A_WHILE), Err(WaitError::TimedOut(_))));
}

#[test]
fn a_child_that_drops_a_vi_in_the_middle_of_a_message_does_not_abort_it() {
    let mut scene = Scene::new();
    let big = 20 << 20;
    scene
        .far
        .vi
        .post_send(Message::new(1).payload(buffer_of(&scene.other, &bytes(1, big))).by(Path::Buffered))
        .unwrap();
    let mut scene = in_child(scene, drop);
    let Scene { one, near, far, .. } = &mut scene;
    near.vi.post_recv(Receive::new(1).into(buffer(one, big))).unwrap();
    let done = loop {
        far.vi.poll();
        if let Some(done) = near.vi.poll() {
            break done;
        }
    };
    assert_eq!(done.status, Ok(()));
    verify(1, &done.into_buffer().unwrap());
}

fn hold(line: &mut Line, token: u64) -> InPlace {
    line.vi.post_recv(Receive::new(token).in_place()).unwrap();
    line.received().into_in_place().unwrap()
}

/// Two payloads held by the parent, with which the child does something.
fn held_while(child: impl FnOnce(Scene, InPlace, InPlace)) {
    let mut scene = Scene::new();
    for token in [1, 2] {
        let payload = buffer_of(&scene.other, &bytes(token, 6000));
        scene.far.vi.post_send(Message::new(token).payload(payload).by(Path::Referenced)).unwrap();
    }
    let (first, second) = (hold(&mut scene.near, 1), hold(&mut scene.near, 2));
    assert!(scene.near.vi.poll().is_none(), "the sender is told that they are held");
    let (mut scene, first, second) =
        in_child((scene, first, second), |(scene, first, second)| child(scene, first, second));
    // The child gave nothing back.
    let early = scene.far.vi.wait(A_WHILE);
    assert!(matches!(early, Err(WaitError::TimedOut(_))), "{early:?}");
    scene.near.vi.receiver().release(second);
    assert_eq!(scene.far.sent().token, 2);
    scene.near.vi.receiver().release(first);
    assert_eq!(scene.far.sent().token, 1);
    scene.still_works();
}

#[test]
fn a_payload_released_in_a_forked_child_stays_held() {
    held_while(|mut scene, first, second| {
        scene.near.vi.receiver().release(first);
        scene.near.vi.receiver().release(second);
    });
}

#[test]
fn a_payload_dropped_in_a_forked_child_stays_held() {
    held_while(|mut scene, first, second| {
        drop((first, second));
        assert!(scene.near.vi.poll().is_none());
    });
}

/// A queue of `count` VIs whose ends are both in this process.
fn queue_of(scene: &Scene, count: usize) -> (CompletionQueue, Vec<(Line, Line)>) {
    let queue = scene.one.completion_queue().unwrap();
    let options = ViOptions::new().queue(&queue);
    let lines = (0..count).map(|_| both_ends(&scene.one, &scene.other, &options, &ViOptions::new())).collect();
    (queue, lines)
}

#[test]
fn a_queue_polled_in_a_forked_child_steals_no_ring_from_the_parent() {
    let scene = Scene::new();
    let (mut queue, mut lines) = queue_of(&scene, 12);
    assert_eq!(queue.poll(), None);
    let (near, far) = &mut lines[7];
    near.vi.post_recv(Receive::new(1).into(buffer(&scene.one, 8))).unwrap();
    let id = near.vi.id();
    far.vi.send_bytes(1, b"ring").unwrap();
    let (mut queue, _lines) = in_child((queue, lines), |(mut queue, _lines)| {
        assert_eq!(queue.poll(), None, "this queue is the parent's");
    });
    assert_eq!(queue.wait(PATIENCE / 10), Ok(id), "the parent still hears of it");
}

#[test]
fn a_queue_disarmed_in_a_forked_child_stays_armed_in_the_parent() {
    let scene = Scene::new();
    let (mut queue, mut lines) = queue_of(&scene, 1);
    queue.descriptor().unwrap();
    let (near, _) = &mut lines[0];
    near.vi.post_recv(Receive::new(1).into(buffer(&scene.one, 8))).unwrap();
    assert_eq!(queue.arm(), Armed::Waiting);
    let (mut queue, mut lines) = in_child((queue, lines), |(mut queue, lines)| {
        queue.disarm();
        let _ = queue.arm();
        queue.disarm();
        drop(lines);
    });
    lines[0].1.vi.send_bytes(1, b"ring").unwrap();
    let descriptor = queue.descriptor().unwrap();
    let mut polled = [rustix::event::PollFd::from_borrowed_fd(descriptor, rustix::event::PollFlags::IN)];
    let timeout = rustix::time::Timespec::try_from(PATIENCE / 10).unwrap();
    assert_eq!(rustix::event::poll(&mut polled, Some(&timeout)), Ok(1), "the descriptor tells the parent");
}

#[test]
fn a_background_vi_in_a_forked_child_refuses_and_does_not_hang() {
    let scene = Scene::new();
    let Scene { stage: _stage, one, other, near, far } = scene;
    let background = Background::spawn(near.vi).unwrap();
    let (background, mut far, ..) = in_child((background, far, one, other), |(background, _far, one, _other)| {
        assert_eq!(background.send_bytes(1, b"x"), Err(PostError::ForkedChild));
        let refused = background.post_send(Message::new(1)).unwrap_err();
        assert_eq!(refused.reason, PostError::ForkedChild);
        let refused = background.post_recv(Receive::new(1).into(buffer(&one, 8))).unwrap_err();
        assert_eq!(refused.reason, PostError::ForkedChild);
        assert_eq!(background.wait(Duration::from_secs(2)).unwrap_err(), WaitError::ForkedChild);
        drop(background);
    });
    far.vi.send_bytes(1, b"hello").unwrap();
    far.sent();
    drop(background);
    assert_eq!(far.end().0, Failure::PeerClosed);
}

#[test]
fn a_child_can_open_a_nic_of_its_own() {
    // What every error of a forked child tells it to do.
    let scene = Scene::new();
    let listener = scene.one.listen("shm:parents").unwrap();
    let (config, accepting) = (scene.stage.config(), listener);
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            let mut line = Line::new(accepting.accept(Duration::from_secs(3)).ok()?);
            line.vi.post_recv(Receive::new(1).into(buffer(&scene.one, 8))).unwrap();
            Some(line.received().length)
        });
        in_child((), |()| {
            let nic = Nic::with(config).expect("a Nic in the child");
            let mut vi = nic.connect("shm:parents").expect("a connection from the child");
            vi.send_bytes(1, b"child").expect("a message from the child");
            vi.disconnect(PATIENCE).expect("a good end");
        });
        assert_eq!(served.join().unwrap(), Some(5));
    });
}
