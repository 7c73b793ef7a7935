//! A file from one end of a stream to the other: whole, resumed, damaged, cut off, refused.

use crate::place::{Fault, Place, pair};
use highwire_transfer::{
    BLOCK_BYTES, Destination, NameError, PeerError, Progress, Reason, ReceiveError, SendError, Source, Violation,
    receive, send,
};
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime};

#[test]
fn a_file_arrives_with_its_bytes_its_time_and_its_permissions() {
    for (bytes, mode) in [(0, 0o600), (1, 0o644), (PIECE - 1, 0o400), (PIECE, 0o755), (3 * PIECE + 17, 0o600)] {
        let place = Place::new(bytes);
        let modified = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
        let file = File::options().write(true).open(place.source()).unwrap();
        file.set_modified(modified).unwrap();
        file.set_permissions(Permissions::from_mode(mode)).unwrap();
        let received = place.exchange_with(&place.destination(), Fault::None, Fault::None).received.unwrap();
        assert_eq!(received.not_executable, mode == 0o755, "{mode:o}");
        assert_eq!(fs::metadata(place.whole()).unwrap().mode() & 0o7111, 0, "{mode:o} was not forced");
        let ends = place.exchange_with(&place.destination().force(true), Fault::None, Fault::None);
        assert_eq!(place.assert_whole(&ends), 0);
        let found = fs::metadata(place.whole()).unwrap();
        assert_eq!(found.modified().unwrap(), modified);
        // What the umask takes away is never more than others' rights.
        assert_eq!(found.mode() & 0o7700, mode & 0o700, "{:o} of {mode:o}", found.mode());
        assert_eq!(found.mode() & 0o77 & !mode, 0, "{:o} of {mode:o}", found.mode());
    }
}

#[test]
fn zeros_take_no_room_where_they_arrive() {
    const MIB: u64 = 1 << 20;
    let mut place = Place::new(0);
    let file = File::options().write(true).open(place.source()).unwrap();
    file.set_len(40 * MIB + 5).unwrap();
    for at in [0, 20 * MIB - 1, 20 * MIB, 40 * MIB - 3] {
        file.write_all_at(b"here", at).unwrap();
    }
    place.bytes = fs::read(place.source()).unwrap();
    for there in [0, 10 * MIB as usize + 1] {
        place.leave_part(&place.bytes[..there]);
        assert_eq!(place.assert_whole(&place.exchange()), there as u64);
        // The pieces with bytes in them, and what was there before.
        let most = 4 * PIECE as u64 + there as u64 + MIB;
        let blocks = fs::metadata(place.whole()).unwrap().blocks();
        assert!(blocks * 512 <= most, "{blocks} blocks of 512 bytes, {most} bytes are enough");
        fs::remove_file(place.whole()).unwrap();
    }
}

#[test]
fn an_interrupted_file_goes_on_wherever_it_stopped() {
    let place = Place::new(2 * PIECE + 100);
    let size = place.bytes.len();
    for there in [0, 1, PIECE - 1, PIECE, PIECE + 1, size - 1, size] {
        place.leave_part(&place.bytes[..there]);
        let ends = place.exchange();
        assert_eq!(place.assert_whole(&ends), there as u64);
        fs::remove_file(place.whole()).unwrap();
    }
}

#[test]
fn what_is_no_beginning_of_the_file_is_sent_again() {
    let place = Place::new(PIECE + 100);
    let size = place.bytes.len();
    let another = place.bytes.iter().map(|byte| byte ^ 1).collect();
    let flipped = |at: usize| {
        let mut part = place.bytes[..size - 10].to_vec();
        part[at] ^= 1;
        part
    };
    let longer = [&place.bytes[..], &place.bytes[..]].concat();
    let cases = [(another, 0), (flipped(0), 0), (flipped(PIECE + 5), 0), (vec![0; size], 0), (longer, size)];
    for (part, resumed_from) in cases {
        place.leave_part(&part);
        let ends = place.exchange();
        assert_eq!(place.assert_whole(&ends), resumed_from as u64);
        fs::remove_file(place.whole()).unwrap();
    }
}

#[test]
fn only_what_is_behind_a_difference_is_sent_again() {
    let block = BLOCK_BYTES as usize;
    let place = Place::new(block + 1000);
    for (wrong, resumed_from) in [(block - 1, 0), (block, block), (block + 499, block)] {
        let mut part = place.bytes[..block + 500].to_vec();
        part[wrong] ^= 1;
        place.leave_part(&part);
        let ends = place.exchange();
        assert_eq!(place.assert_whole(&ends), resumed_from as u64, "byte {wrong} is wrong");
        fs::remove_file(place.whole()).unwrap();
    }
}

#[test]
fn a_bit_that_is_flipped_on_the_way_never_reaches_a_file() {
    let place = Place::new(PIECE + 300);
    // What the sender writes, as the document has it.
    let first = OFFER + RECORD;
    let second = first + RECORD + PIECE as u64;
    let end = second + RECORD + 300;
    let of_record = |at: u64| [at, at + 5, at + 9, at + 17];
    let places = [of_record(OFFER), of_record(first), of_record(second), of_record(end)].concat();
    let content = [first + RECORD, second - 1, second + RECORD, end - 1];
    let offer = [0, 4, 7, 8, 16, 24, 28, 32, 41];
    for at in offer.iter().chain(&places).chain(&content) {
        let ends = place.exchange_with(&place.destination(), Fault::Flip(*at), Fault::None);
        if ends.received.is_ok() {
            // A number that nobody looks at in a record without one.
            assert!([OFFER + 5, end + 5].contains(at), "byte {at}: {ends:?}");
            fs::remove_file(place.whole()).unwrap();
            continue;
        }
        assert!(ends.sent.is_err(), "byte {at}: {ends:?}");
        place.assert_resumable();
        if content.contains(at) {
            assert!(matches!(ends.received, Err(ReceiveError::Damaged { .. })), "byte {at}: {ends:?}");
            assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::Damaged })), "byte {at}: {ends:?}");
            let kept = if *at < second { 0 } else { PIECE as u64 };
            assert_eq!(place.assert_whole(&place.exchange()), kept);
            fs::remove_file(place.whole()).unwrap();
        }
        let _ = fs::remove_file(place.part());
    }
}

#[test]
fn a_bit_that_is_flipped_on_the_way_back_is_no_confirmation() {
    let place = Place::new(1000);
    place.leave_part(&place.bytes[..10]);
    // `have`, the `kept` of its only block, `done`.
    for at in [0, 4, 8, 11, RECORD, RECORD + 8, RECORD + 16, RECORD + 23, 2 * RECORD, 2 * RECORD + 20] {
        let ends = place.exchange_with(&place.destination(), Fault::None, Fault::Flip(at));
        // What is there seems to be something else, so it is sent again.
        let only_costs = [RECORD + 16, RECORD + 23].contains(&at);
        assert_eq!(ends.sent.is_ok(), only_costs, "byte {at}: {ends:?}");
        let _ = fs::remove_file(place.whole());
        place.leave_part(&place.bytes[..10]);
    }
}

#[test]
fn a_connection_that_is_cut_at_any_stage_loses_nothing() {
    let place = Place::new(PIECE + 300);
    let first = OFFER + RECORD;
    let end = first + 2 * RECORD + place.bytes.len() as u64;
    let forth = [0, 3, 8, OFFER - 1, OFFER, OFFER + 10, first, first + RECORD, first + 5000, end - 1, end, end + 23];
    for cut in forth {
        let _ = fs::remove_file(place.part());
        let ends = place.exchange_with(&place.destination(), Fault::Cut(cut), Fault::None);
        assert!(ends.sent.is_err() && ends.received.is_err(), "cut at {cut}: {ends:?}");
        place.assert_resumable();
    }
    // All that came is there, and is not sent again.
    assert_eq!(place.assert_whole(&place.exchange()), place.bytes.len() as u64);
    fs::remove_file(place.whole()).unwrap();
    for cut in [0, 4, RECORD - 1, RECORD, RECORD + 1, 2 * RECORD - 1] {
        let ends = place.exchange_with(&place.destination(), Fault::None, Fault::Cut(cut));
        assert!(ends.sent.is_err(), "cut at {cut}: {ends:?}");
        if cut < RECORD {
            assert!(ends.received.is_err(), "cut at {cut}: {ends:?}");
            place.assert_resumable();
        } else {
            // Only the confirmation was lost: the sender says that it does not know, and the file is there.
            assert!(matches!(ends.sent, Err(SendError::Unconfirmed { .. })), "cut at {cut}: {ends:?}");
            assert_eq!(fs::read(place.whole()).unwrap(), place.bytes);
            fs::remove_file(place.whole()).unwrap();
        }
    }
}

#[test]
fn a_file_that_changes_while_it_is_sent_is_not_put_in_place() {
    type Change = fn(&Path);
    let append: Change = |path| File::options().append(true).open(path).unwrap().write_all(b"more").unwrap();
    let shorten: Change = |path| File::options().write(true).open(path).unwrap().set_len(10).unwrap();
    let rewrite: Change = |path| File::options().write(true).open(path).unwrap().write_all(b"other").unwrap();
    for change in [append, shorten, rewrite] {
        for at in [PIECE as u64, 3 * PIECE as u64] {
            let place = Place::new(3 * PIECE);
            let source = place.source();
            let ends = place.exchange_while(move |progress| {
                if has_moved(progress, at) {
                    change(&source);
                }
            });
            assert!(matches!(ends.sent, Err(SendError::Changed { .. })), "{ends:?}");
            assert!(matches!(ends.received, Err(ReceiveError::Stopped { reason: Reason::Changed })), "{ends:?}");
            assert!(!place.whole().exists());
            let again = place.exchange();
            assert!(again.sent.is_ok() && again.received.is_ok(), "{again:?}");
            assert_eq!(fs::read(place.whole()).unwrap(), fs::read(place.source()).unwrap());
        }
    }
}

#[test]
fn a_file_that_is_there_is_kept_unless_it_may_be_replaced() {
    let place = Place::new(1000);
    fs::write(place.whole(), "precious").unwrap();
    let ends = place.exchange();
    assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::Exists })), "{ends:?}");
    assert!(matches!(ends.received, Err(ReceiveError::Exists { .. })), "{ends:?}");
    assert_eq!(fs::read(place.whole()).unwrap(), b"precious");
    assert!(!place.part().exists());
    let ends = place.exchange_with(&place.destination().force(true).sync(true), Fault::None, Fault::None);
    place.assert_whole(&ends);
}

#[test]
fn a_file_that_appears_meanwhile_is_kept_and_nothing_is_sent_twice() {
    let place = Place::new(2 * PIECE);
    fs::set_permissions(place.source(), Permissions::from_mode(0o400)).unwrap();
    let whole = place.whole();
    let ends = place.exchange_while(move |progress| {
        if has_moved(progress, PIECE as u64) {
            fs::write(&whole, "precious").unwrap();
        }
    });
    assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::Exists })), "{ends:?}");
    assert!(matches!(ends.received, Err(ReceiveError::Exists { .. })), "{ends:?}");
    assert_eq!(fs::read(place.whole()).unwrap(), b"precious");
    assert_eq!(fs::metadata(place.part()).unwrap().mode() & 0o777, 0o600, "it can be opened again");
    let ends = place.exchange_with(&place.destination().force(true), Fault::None, Fault::None);
    assert_eq!(fs::metadata(place.whole()).unwrap().mode() & 0o777, 0o400);
    assert_eq!(place.assert_whole(&ends), 2 * PIECE as u64);
}

#[test]
fn what_is_no_file_is_neither_replaced_nor_written_to() {
    let place = Place::new(1000);
    let _socket = UnixListener::bind(place.path().join("socket")).unwrap();
    fs::create_dir(place.path().join("directory")).unwrap();
    for name in ["socket", "directory"] {
        let destination = Destination::file(place.path().join(name)).force(true);
        assert!(matches!(destination.check(), Err(ReceiveError::NotReplaceable { .. })));
        let ends = place.exchange_with(&destination, Fault::None, Fault::None);
        assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::NotReplaceable })), "{ends:?}");
    }
    // A link in the place of the partial file would have us write to what it leads to.
    let victim = place.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, place.part()).unwrap();
    let ends = place.exchange();
    assert!(matches!(ends.received, Err(ReceiveError::NotReplaceable { .. })), "{ends:?}");
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    // One that has the file's own name is replaced, not followed.
    fs::remove_file(place.part()).unwrap();
    symlink(&victim, place.whole()).unwrap();
    assert!(matches!(place.exchange().received, Err(ReceiveError::Exists { .. })));
    place.assert_whole(&place.exchange_with(&place.destination().force(true), Fault::None, Fault::None));
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
}

#[test]
fn a_part_that_no_receiver_left_is_not_touched() {
    let place = Place::new(PIECE + 100);
    let longer = [&place.bytes[..], b"and more"].concat();
    // Not even one that could be the beginning of this file.
    for notes in [&b"precious notes"[..], &place.bytes[..PIECE], &longer] {
        fs::write(place.part(), notes).unwrap();
        fs::set_permissions(place.part(), Permissions::from_mode(0o644)).unwrap();
        for replace in [false, true] {
            let ends = place.exchange_with(&place.destination().force(replace), Fault::None, Fault::None);
            assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::ForeignPart })), "{ends:?}");
            let said = ends.received.unwrap_err();
            assert!(matches!(said, ReceiveError::ForeignPart { .. }), "{said}");
            assert!(said.to_string().contains("letter.part") && said.to_string().contains("--output"), "{said}");
            assert_eq!(fs::read(place.part()).unwrap(), notes);
            assert_eq!(fs::metadata(place.part()).unwrap().mode() & 0o777, 0o644);
            assert!(!place.whole().exists());
        }
    }
    // An empty one that another program has open to write it.
    let other = fs::File::create(place.part()).unwrap();
    let ends = place.exchange();
    assert!(matches!(ends.received, Err(ReceiveError::ForeignPart { .. })), "{ends:?}");
    assert_eq!(fs::metadata(place.part()).unwrap().len(), 0);
    drop(other);
    // An empty one has nothing to lose.
    fs::write(place.part(), "").unwrap();
    place.assert_whole(&place.exchange());
    let mark = rustix::fs::getxattr_query(place.whole(), "user.highwire.part");
    assert_eq!(mark, Err(rustix::io::Errno::NODATA), "the whole file is not marked any more");
}

#[test]
fn a_part_on_a_file_system_without_marks_loses_no_byte() {
    let place = Place::new(PIECE + 100);
    let Some(_disk) = Disk::mount_type(place.here(), "ramfs", "mode=755") else {
        // Not by `eprintln`: the test runner would swallow what is said there.
        writeln!(std::io::stderr(), "SKIPPED, needs root to mount ramfs: a file system without extended attributes")
            .unwrap();
        return;
    };
    let longer = [&place.bytes[..], b"and more"].concat();
    for notes in [&b"precious notes"[..], &longer] {
        fs::write(place.part(), notes).unwrap();
        let ends = place.exchange();
        assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::ForeignPart })), "{ends:?}");
        assert!(matches!(ends.received, Err(ReceiveError::ForeignPart { .. })), "{ends:?}");
        assert_eq!(fs::read(place.part()).unwrap(), notes);
    }
    fs::write(place.part(), &place.bytes[..PIECE]).unwrap();
    assert_eq!(place.assert_whole(&place.exchange()), PIECE as u64);
}

#[test]
fn a_place_that_is_missing_or_closed_is_named_on_both_sides() {
    let place = Place::new(1000);
    let nowhere = Destination::directory(place.path().join("nowhere"));
    assert!(matches!(nowhere.check(), Err(ReceiveError::NoDirectory { .. })));
    let in_file = Destination::file(place.source().join("x"));
    assert!(matches!(in_file.check(), Err(ReceiveError::NoDirectory { .. })));
    // Nobody may create a file there, whoever it is.
    let ends = place.exchange_with(&Destination::directory("/sys/kernel"), Fault::None, Fault::None);
    assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::Denied })), "{ends:?}");
    let said = ends.received.unwrap_err().to_string();
    assert!(said.contains("/sys/kernel/letter.part") && said.contains("--into"), "{said}");
}

#[test]
fn a_full_disk_is_told_on_both_sides_and_is_gone_on_from() {
    let place = Place::new(4 * PIECE);
    let Some(disk) = Disk::mount(place.here(), "1m") else {
        // Not by `eprintln`: the test runner would swallow what is said there.
        writeln!(std::io::stderr(), "SKIPPED, needs root to mount a small disk: a full disk").unwrap();
        return;
    };
    let ends = place.exchange();
    assert!(matches!(ends.sent, Err(SendError::Stopped { reason: Reason::Full })), "{ends:?}");
    let Err(ReceiveError::Full { written, .. }) = ends.received else { panic!("{ends:?}") };
    assert_eq!(written, 2 * PIECE as u64);
    place.assert_resumable();
    disk.resize("8m");
    assert_eq!(place.assert_whole(&place.exchange()), written);
}

#[test]
fn only_regular_files_with_names_that_can_be_used_are_sent() {
    let place = Place::new(10);
    let not_regular = |path: &Path, expected: &str| {
        let refused = Source::open(path).unwrap_err();
        assert!(matches!(refused, SendError::NotRegular { what, .. } if what == expected), "{refused}");
        refused.to_string()
    };
    assert!(not_regular(place.path(), "a directory").contains("tar"));
    let pipe = place.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    not_regular(&pipe, "a pipe");
    not_regular(Path::new("/dev/zero"), "a device");
    let missing = Source::open(&place.path().join("missing")).unwrap_err().to_string();
    assert!(missing.contains("missing") && missing.contains("look at its name"), "{missing}");
    for (name, expected) in [
        (&b"\xff"[..], NameError::NotText),
        (b"bell\x07", NameError::Control),
        (&[b'x'; 251], NameError::TooLong { bytes: 251 }),
    ] {
        let path = place.path().join(OsStr::from_bytes(name));
        fs::write(&path, "").unwrap();
        let refused = Source::open(&path).unwrap_err();
        assert!(matches!(&refused, SendError::Name { error, .. } if *error == expected), "{refused}");
    }
}

#[test]
fn a_file_is_received_once_at_a_time() {
    let place = Place::new(3 * PIECE);
    let source = Source::open(&place.source()).unwrap();
    let (mut near, mut far) = pair();
    let destination = place.destination();
    let first = thread::spawn(move || receive(&mut far, &destination, |_| ()));
    let mut second = None;
    let sent = send(&mut near, &source, |progress| {
        if has_moved(progress, PIECE as u64) {
            second = Some(place.exchange());
        }
    });
    let second = second.unwrap();
    assert!(matches!(second.sent, Err(SendError::Stopped { reason: Reason::Busy })), "{second:?}");
    assert!(matches!(second.received, Err(ReceiveError::Busy { .. })), "{second:?}");
    assert!(sent.is_ok() && first.join().unwrap().is_ok());
    assert_eq!(fs::read(place.whole()).unwrap(), place.bytes);
}

#[test]
fn a_part_that_another_took_the_place_of_is_not_put_in_place() {
    let place = Place::new(3 * PIECE);
    let source = Source::open(&place.source()).unwrap();
    let (mut near, mut far) = pair();
    let (destination, part) = (place.destination(), place.whole().with_added_extension("part"));
    let receiver = thread::spawn(move || receive(&mut far, &destination, |_| ()));
    let sent = send(&mut near, &source, |progress| {
        if has_moved(progress, PIECE as u64) {
            while fs::remove_file(&part).is_err() {}
            fs::write(&part, "something else").unwrap();
        }
    });
    let received = receiver.join().unwrap();
    assert!(matches!(received, Err(ReceiveError::Busy { .. })), "{received:?}");
    assert!(sent.is_err() && !place.whole().exists());
    assert_eq!(fs::read(&part).unwrap(), b"something else");
}

#[test]
fn a_file_that_has_more_than_it_says_is_not_sent() {
    let place = Place::new(1);
    let source = Source::open(std::path::Path::new("/proc/cpuinfo")).unwrap();
    let (mut near, mut far) = pair();
    let destination = place.destination();
    let receiver = thread::spawn(move || receive(&mut far, &destination, |_| ()));
    let sent = send(&mut near, &source, |_| ());
    assert!(matches!(sent, Err(SendError::Changed { .. })), "{sent:?}");
    assert!(receiver.join().unwrap().is_err() && !place.here().join("cpuinfo").exists());
}

#[test]
fn several_files_go_over_one_stream() {
    let place = Place::new(PIECE + 1);
    let (mut near, mut far) = pair();
    let source = Source::open(&place.source()).unwrap();
    let sender = thread::spawn(move || (0..3).map(|_| send(&mut near, &source, |_| ()).unwrap()).last());
    for number in 0..3 {
        let path = place.here().join(number.to_string());
        receive(&mut far, &Destination::file(&path), |_| ()).unwrap();
        assert_eq!(fs::read(path).unwrap(), place.bytes);
    }
    assert_eq!(sender.join().unwrap().unwrap().bytes, place.bytes.len() as u64);
}

#[test]
fn a_stranger_learns_nothing_and_leaves_nothing() {
    let place = Place::new(10);
    for greeting in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"SSH-2.0-OpenSSH\r\n", &[0; 64]] {
        let (mut near, mut far) = pair();
        near.write_all(greeting).unwrap();
        let refused = receive(&mut far, &place.destination(), |_| ()).unwrap_err();
        assert!(matches!(refused, ReceiveError::Peer(PeerError::NotHighwire { .. })), "{refused}");
        let source = Source::open(&place.source()).unwrap();
        far.write_all(greeting).unwrap();
        let refused = send(&mut near, &source, |_| ()).unwrap_err();
        assert!(matches!(refused, SendError::Peer(PeerError::NotHighwire { .. })), "{refused}");
    }
    let damaged = ReceiveError::from(Violation::OfferChecksum).to_string();
    assert!(damaged.contains("broke the protocol"), "{damaged}");
    assert_eq!(fs::read_dir(place.here()).unwrap().count(), 0);
}

/// Whether just these bytes are behind us.
fn has_moved(progress: Progress, expected: u64) -> bool {
    matches!(progress, Progress::Moved { bytes, .. } if bytes == expected)
}

/// A small disk, unmounted with this value.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf, size: &str) -> Option<Disk> {
        Disk::mount_type(at, "tmpfs", &format!("size={size}"))
    }

    fn mount_type(at: PathBuf, file_system: &str, options: &str) -> Option<Disk> {
        let mounted = Command::new("mount").args(["-t", file_system, "-o", options, "small"]).arg(&at).output();
        mounted.is_ok_and(|mounted| mounted.status.success()).then_some(Disk(at))
    }

    fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        assert!(Command::new("mount").args(["-o", &options]).arg(&self.0).status().unwrap().success());
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// What a sender writes at once.
const PIECE: usize = 512 << 10;
/// The offer of a file that is called `letter`.
const OFFER: u64 = 46;
const RECORD: u64 = 24;
