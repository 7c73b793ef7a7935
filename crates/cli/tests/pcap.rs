//! `--pcap` as its users meet it: files that hold what was said, and that `tools/highwire.lua` explains.

mod place;

use assert_cmd::assert::OutputAssertExt;
use place::{Echo, Place};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_simulation_is_recorded_the_same_for_the_same_seed() {
    let place = Place::new();
    let (one, again) = (place.file("one.pcap"), place.file("again.pcap"));
    let report = place.run(&["simulate", "--seed", "0", "--json", "--pcap", &one]);
    assert_eq!(report, place.run(&["simulate", "--seed", "0", "--json", "--pcap", &again]));
    assert!(std::fs::read(&one).unwrap() == std::fs::read(&again).unwrap(), "the same seed, and another file");
    let report: Value = serde_json::from_str(&report).unwrap();
    let packets = read(&one);
    assert_eq!((packets[0].from_first, packets[0].bytes.len(), packets[0].bytes[1]), (true, 1200, HELLO));
    // Everything that the session counts was sent by the side that connects; a hello comes before it.
    let sent = packets.iter().filter(|packet| packet.from_first && packet.bytes[1] > WELCOME).count();
    assert_eq!(Value::from(sent), report["connects"]["packets_sent"]);
    assert!(packets.iter().any(|packet| !packet.from_first && packet.bytes[1] == DATA));
}

#[test]
fn ping_and_echo_record_the_same_conversation() {
    let place = Place::new();
    let key = place.file("cluster.key");
    place.run(&["key", "new", &key]);
    for (address, with) in [("udp:127.0.0.1:0", vec!["--key", &key]), ("udp:[::1]:0", vec![])] {
        let (heard, said) = (place.file("echo.pcap"), place.file("ping.pcap"));
        let echo = Echo::start(&mut place.echo(address, &[&with[..], &["--pcap", &heard]].concat()));
        let ping = ["ping", &echo.address, "--count", "3", "--interval", "0", "--size", "20K", "--pcap", &said];
        let told = place.run(&[&ping[..], &with].concat());
        assert!(told.contains("3 sent and answered"), "{told}");
        let said: Vec<Packet> = read(&said).into_iter().filter(|packet| packet.from_first).collect();
        assert_eq!(said[0].bytes[1], HELLO);
        assert!(said.iter().map(|packet| packet.bytes.len()).sum::<usize>() > 3 * (20 << 10));
        // While it runs everything is in its file once it has nothing else to do, so killing it loses nothing.
        until("the echo has recorded what the ping has said", || {
            let heard = read(&heard);
            said.iter().all(|packet| heard.iter().any(|other| other.bytes == packet.bytes))
        });
        drop(echo);
        assert!(read(&heard).iter().any(|packet| !packet.from_first && packet.bytes[1] == WELCOME));
    }
}

#[test]
fn a_ping_that_nobody_answers_is_recorded_and_payloads_can_be_cut() {
    let place = Place::new();
    let file = place.file("alone.pcap");
    let nobody = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = format!("udp:{}", nobody.local_addr().unwrap());
    place.highwire(&["ping", &address, "--timeout", "0.5", "--pcap", &file, "--snap", "64"]).assert().code(1);
    let packets = read(&file);
    assert!(packets.len() >= 3, "{} hellos", packets.len());
    assert!(packets.iter().all(|packet| (packet.bytes.len(), packet.length) == (64, 1200)));
}

#[test]
fn what_cannot_be_recorded_is_told() {
    let place = Place::new();
    let fails = |arguments: &[&str], code: i32, expected: &str| {
        let failed = place.highwire(arguments).assert().code(code);
        let said = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
        assert!(said.contains(expected), "{arguments:?}: {expected:?} is missing in:\n{said}");
        String::from_utf8_lossy(&failed.get_output().stdout).into_owned()
    };
    for command in [&["simulate"][..], &["ping", "udp:127.0.0.1:9"], &["echo", "udp:127.0.0.1:0"]] {
        let command = [command, &["--pcap", "/nowhere/at/all.pcap"]].concat();
        fails(&command, 1, "\"/nowhere/at/all.pcap\" cannot be created to record packets: No such file");
    }
    let unused = place.file("unused.pcap");
    fails(&["ping", "shm:echo", "--pcap", &unused], 1, "shm:echo goes through memory");
    assert!(!Path::new(&unused).exists());
    fails(&["simulate", "--runs", "2", "--pcap", &unused], 2, "cannot be used with");
    fails(&["simulate", "--snap", "64"], 2, "--pcap");
    // The traffic does not care.
    let full = "\"/dev/full\" ends after 0 packets, and later ones are not recorded: No space left";
    assert!(fails(&["simulate", "--pcap", "/dev/full"], 1, full).contains("Delivered"));
    let mut echo = Echo::start(place.echo("udp:127.0.0.1:0", &["--pcap", "/dev/full"]).stderr(Stdio::piped()));
    let ping = ["ping", &echo.address, "--count", "2", "--interval", "0", "--pcap", "/dev/full"];
    assert!(fails(&ping, 1, full).contains("2 sent and answered"));
    let mut said = String::new();
    BufReader::new(echo.child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains(full), "{said}");
}

#[test]
fn wireshark_shows_every_field_of_a_plain_run_as_it_is() {
    let place = Place::new();
    let file = place.file("plain.pcap");
    // Packets are damaged in this one.
    place.run(&["simulate", "--seed", "0", "--pcap", &file]);
    let fields = [HEADER_FIELDS, ACK_FIELDS, DATA_FIELDS, PROBE_FIELDS, OFFER_FIELDS].concat();
    let Some(rows) = tshark(&file, &fields) else { return };
    let packets = read(&file);
    assert_eq!(rows.len(), packets.len());
    let mut seen = [0; 8];
    let (mut damaged, mut sizes_tried) = (0, 0);
    for (at, (row, packet)) in rows.iter().zip(&packets).enumerate() {
        let (kind, bytes) = (packet.bytes[1], &packet.bytes);
        let right = crc32c(bytes) == u32_at(bytes, 48);
        let expected = [header(bytes, right), ack(bytes), data(bytes), probe(bytes), offer(bytes)].concat();
        // What was damaged may be anything, but its header is shown.
        let compared = if right { expected.len() } else { header(bytes, right).len() };
        assert_eq!(row[..compared], expected[..compared], "packet {}", at + 1);
        damaged += usize::from(!right);
        sizes_tried += usize::from(right && kind == PROBE && bytes.len() > 64);
        seen[usize::from(kind).min(7)] += 1;
    }
    assert!(damaged > 0 && seen[1..=5].iter().all(|&count| count > 0), "{damaged} damaged, of kinds: {seen:?}");
    assert!(sizes_tried > 0, "no probe of a size was seen");
}

#[test]
fn wireshark_shows_sealed_packets_as_such() {
    let place = Place::new();
    let file = place.file("sealed.pcap");
    place.run(&["simulate", "--seed", "71", "--pcap", &file]);
    let fields = ["highwire.number", "highwire.flags.sealed", "highwire.tag", "highwire.checksum.status"];
    let fields = [&fields[..], &["highwire.ciphertext", "highwire.public_key", "highwire.payload"]].concat();
    let Some(rows) = tshark(&file, &fields) else { return };
    for (row, packet) in rows.iter().zip(read(&file)) {
        let bytes = &packet.bytes;
        if bytes[2] & 64 == 0 {
            // The bit was damaged.
            continue;
        }
        let (sealed, greeting) = (&bytes[64..], bytes[1] <= WELCOME);
        let ciphertext = if greeting { &bytes[96..120] } else { sealed };
        let public = if greeting { hex(&bytes[64..96]) } else { String::new() };
        let number = u64_at(bytes, 8).to_string();
        let expected = [number, "1".into(), hex(&bytes[48..64]), String::new(), hex(ciphertext), public, String::new()];
        assert_eq!(row[..], expected);
    }
}

#[test]
fn wireshark_says_what_is_wrong_with_malformed_packets_and_nothing_of_good_ones() {
    let place = Place::new();
    let cases: Vec<(Vec<u8>, &str)> = vec![
        // The first one shows whose conversation this is.
        (packet(PROBE, 0, &[], &[]), ""),
        (packet(CLOSE, 0, &[], &[]), ""),
        (vec![1; 20], "20 bytes: shorter than a header"),
        (packet(PROBE, 0, &[(0, 2)], &[]), "Another version"),
        (packet(9, 0, &[], &[]), "Unknown kind"),
        (packet(PROBE, 128, &[], &[]), "Unknown flag 128"),
        (packet(PROBE, 0, &[(31, 1)], &[]), "Byte 31 is not 0"),
        (packet(PROBE, 0, &[(30, 129)], &[]), "More than 128 control bytes"),
        (packet(PROBE, 0, &[(28, 5)], &[]), "The length is 5, but 0 bytes follow the header"),
        (packet(PROBE, 0, &[(48, 0xff), (49, 0xff)], &[]), "The checksum is wrong"),
        (packet(PROBE, 0, &[(32, 2), (34, 1)], &[]), "begins before packet 0"),
        (packet(ACK, 0, &[], &[0; 5]), "5 bytes: an ack has at least 6"),
        (packet(ACK, 0, &[], &[0, 0, 0, 0, 2, 0]), "2 ranges do not fit 6 bytes"),
        (packet(ACK, 0, &[], &[0, 0, 0, 0, 0, 1]), "1 credits are 8 bytes, and 0 are there"),
        (packet(ACK, 0, &[(20, 1)], &[0; 6]), "receive buffer has overflowed"),
        (packet(DATA, 2 | 8, &[(30, 3)], &[0; 18]), "A preface of 19 bytes is cut short: 18 are there"),
        (packet(DATA, 2, &[], &[1, 0, 0, 0, 0, 0, 0, 0, 7, 7]), "2 bytes of payload in a message of 1"),
        (packet(DATA, 0, &[(30, 3)], &[0; 18]), "Control bytes in a packet that is not the first"),
        (packet(FAST, 0, &[(24, 1)], &[]), ""),
        (packet(FAST, 0, &[(24, 9)], &[]), "Unknown word"),
        (packet(FAST, 0, &[(24, 1), (3, 2)], &[]), "A word about a list goes by none"),
        (packet(FAST, 0, &[(24, 2)], &[]), "There is no such list"),
        (packet(HELLO, 0, &[(28, 56)], &[0; 56]), "120 bytes: a hello has exactly 1200"),
        (packet(HELLO, 0, &[(28, 56), (29, 0), (16, 1)], &[0; 1136]), "Fields that this kind does not use are not 0"),
        (packet(WELCOME, 0, &[], &[0; 56]), "An offer of another version"),
        (packet(DATA, 2 | 4 | 16, &[], &[1, 0, 0, 0, 0, 0, 0, 0, 7]), ""),
    ];
    let file = place.file("malformed.pcap");
    write_file(&file, cases.iter().map(|(bytes, _)| &bytes[..]));
    let Some(rows) = tshark(&file, &["_ws.expert.message", "highwire.malformed"]) else { return };
    assert_eq!(rows.len(), cases.len());
    for (at, (row, (_, expected))) in rows.iter().zip(&cases).enumerate() {
        assert!(row[0].contains(expected), "packet {}: {expected:?} is missing in {row:?}", at + 1);
        assert!(!expected.is_empty() || row.iter().all(String::is_empty), "packet {}: {row:?}", at + 1);
    }
}

#[test]
fn wireshark_shows_prefaces_tokens_notes_and_what_is_settled() {
    let place = Place::new();
    let file = place.file("prefaces.pcap");
    let token =
        [&9u32.to_le_bytes()[..], &5u32.to_le_bytes(), &0x0102_0304_0506_0708u64.to_le_bytes(), b"ctl", b"payload: 9"];
    let note = [&[0; 8][..], &[2, 1, 0, 0], &7u32.to_le_bytes(), &8u32.to_le_bytes()].concat();
    let packets = [
        packet(DATA, 2 | 8 | 32, &[(16, 3), (30, 3)], &token.concat()[..28]),
        packet(DATA, 2 | 4, &[(16, 1), (30, 12)], &note),
        packet(PROBE, 0, &[(16, 6), (20, 5), (24, 2)], &[0; 3]),
    ];
    write_file(&file, packets.iter().map(|bytes| &bytes[..]));
    let fields = ["highwire.total", "highwire.immediate", "highwire.token", "highwire.control", "highwire.payload"];
    let notes = ["highwire.note.kind", "highwire.note.detail", "highwire.note.to", "highwire.note.vi"];
    let others = ["highwire.flags.unreliable", "highwire.settled", "highwire.padding", "highwire.message"];
    let Some(rows) = tshark(&file, &[&fields[..], &notes, &others].concat()) else { return };
    assert_eq!(
        rows[0],
        ["9", "5", "0x0102030405060708", &hex(b"ctl"), &hex(b"payload: "), "", "", "", "", "1", "", "", "0"]
    );
    assert_eq!(rows[1], ["0", "0", "", &hex(&note[8..]), "", "2", "1", "7", "8", "0", "", "", "0"]);
    assert_eq!(rows[2], ["", "", "", "", "", "", "", "", "", "0", "8589934597", "000000", ""]);
}

#[test]
fn wireshark_shows_what_is_asked_of_remote_memory() {
    let place = Place::new();
    let file = place.file("memory.pcap");
    let words = |kind: u8, detail: u8, words: &[u32]| {
        let mut note = vec![0; 8];
        note.extend_from_slice(&[kind, detail, 0, 0]);
        words.iter().for_each(|word| note.extend_from_slice(&word.to_le_bytes()));
        packet(DATA, 2 | 4, &[(16, 1), (30, note.len() as u8 - 8)], &note)
    };
    let packets = [
        words(6, 0, &[7, 8, 9, 10, 11, 0, 12, 0]),
        words(7, 0, &[7, 8, 9, 10, 11, 0, 12, 0, 13, 0]),
        words(8, 0, &[7, 8, 13, 0]),
        words(9, 0, &[7, 8]),
        words(10, 2, &[7, 8, 4096, 0]),
        // Cut short: what there is.
        words(7, 0, &[7, 8, 9]),
    ];
    write_file(&file, packets.iter().map(|bytes| &bytes[..]));
    let fields = ["kind", "to", "id", "handle", "tag", "offset", "length", "token", "reason", "bytes"];
    let fields = fields.map(|field| format!("highwire.note.{field}"));
    let Some(rows) = tshark(&file, &fields.each_ref().map(|field| &field[..])) else { return };
    let token = "0x000000000000000d";
    assert_eq!(rows[0], ["6", "7", "8", "9", "10", "11", "12", "", "", ""]);
    assert_eq!(rows[1], ["7", "7", "8", "9", "10", "11", "12", token, "", ""]);
    assert_eq!(rows[2], ["8", "7", "8", "", "", "", "", token, "", ""]);
    assert_eq!(rows[3], ["9", "7", "8", "", "", "", "", "", "", ""]);
    assert_eq!(rows[4], ["10", "7", "8", "", "", "", "", "", "2", "4096"]);
    assert_eq!(rows[5], ["7", "7", "8", "", "", "", "", "", "", ""]);
}

#[test]
fn wireshark_shows_words_about_lists() {
    let place = Place::new();
    let file = place.file("fast.pcap");
    let word =
        |word: u8, others: &[(usize, u8)]| packet(FAST, 0, &[&[(16, 5), (20, 3), (24, word)], others].concat(), &[]);
    let never: Vec<(usize, u8)> = (44..48).map(|at| (at, 255)).collect();
    let packets =
        [word(1, &[(41, 4)]), word(2, &[(44, 2)]), word(3, &[(45, 1), (40, 2)]), word(3, &never), word(4, &[(44, 2)])];
    write_file(&file, packets.iter().map(|bytes| &bytes[..]));
    let fields = ["word", "request", "list", "bytes", "after"].map(|field| format!("highwire.fast.{field}"));
    let fields: Vec<&str> = fields.iter().map(String::as_str).chain(["highwire.vi", "highwire.malformed"]).collect();
    let Some(rows) = tshark(&file, &fields) else { return };
    let expected = [
        ["1", "3", "", "1024", "", "5", ""],
        ["2", "3", "2", "", "", "5", ""],
        ["3", "3", "2", "", "256", "5", ""],
        ["3", "3", "0", "", "4294967295", "5", ""],
        ["4", "3", "2", "", "", "5", ""],
    ];
    assert_eq!(rows, expected);
}

// ── What tshark is to say ────────────────────────────────────────────────────────────────────────

const HEADER_FIELDS: &[&str] = &[
    "highwire.version",
    "highwire.kind",
    "highwire.flags",
    "highwire.flags.first",
    "highwire.flags.last",
    "highwire.flags.acknowledge",
    "highwire.list",
    "highwire.session",
    "highwire.number",
    "highwire.length",
    "highwire.control_length",
    "highwire.ack.next",
    "highwire.ack.count",
    "highwire.credit",
    "highwire.receive",
    "highwire.checksum",
    "highwire.checksum.status",
];

fn header(bytes: &[u8], right: bool) -> Vec<String> {
    let flag = |flag: u8| u8::from(bytes[2] & flag != 0).to_string();
    let ack = u64_at(bytes, 32);
    let checksum = match bytes[2] & 64 {
        0 => [format!("0x{:08x}", u32_at(bytes, 48)), u8::from(right).to_string()],
        _ => [String::new(), String::new()],
    };
    let fields = [
        bytes[0].to_string(),
        bytes[1].to_string(),
        format!("0x{:02x}", bytes[2]),
        flag(2),
        flag(4),
        flag(16),
        bytes[3].to_string(),
        u32_at(bytes, 4).to_string(),
        u64_at(bytes, 8).to_string(),
        u16::from_le_bytes([bytes[28], bytes[29]]).to_string(),
        bytes[30].to_string(),
        (ack >> 16).to_string(),
        (ack & 0xffff).to_string(),
        u32_at(bytes, 40).to_string(),
        u32_at(bytes, 44).to_string(),
    ];
    fields.into_iter().chain(checksum).collect()
}

const ACK_FIELDS: &[&str] = &[
    "highwire.overruns",
    "highwire.buffer",
    "highwire.ack.delay",
    "highwire.ack.ranges",
    "highwire.ack.range.start",
    "highwire.ack.range.length",
    "highwire.ack.credits",
    "highwire.ack.credit.vi",
    "highwire.ack.credit.credit",
];

fn ack(bytes: &[u8]) -> Vec<String> {
    if bytes[1] != ACK || bytes.len() < 70 {
        return vec![String::new(); ACK_FIELDS.len()];
    }
    let all = |values: Vec<u64>| values.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
    let (ranges, rest) = bytes[69..].split_at_checked(12 * usize::from(bytes[68])).unwrap_or_default();
    let credits = rest.get(1..).unwrap_or_default();
    vec![
        u32_at(bytes, 20).to_string(),
        u32_at(bytes, 24).to_string(),
        u32_at(bytes, 64).to_string(),
        bytes[68].to_string(),
        all(ranges.chunks(12).map(|range| u64_at(range, 0)).collect()),
        all(ranges.chunks(12).map(|range| u32_at(range, 8).into()).collect()),
        rest.first().map_or(String::new(), u8::to_string),
        all(credits.chunks_exact(8).map(|credit| u32_at(credit, 0).into()).collect()),
        all(credits.chunks_exact(8).map(|credit| u32_at(credit, 4).into()).collect()),
    ]
}

const DATA_FIELDS: &[&str] = &[
    "highwire.vi",
    "highwire.message",
    "highwire.offset",
    "highwire.total",
    "highwire.immediate",
    "highwire.control",
    "highwire.payload",
];

fn data(bytes: &[u8]) -> Vec<String> {
    let none = String::new;
    let place = match bytes[1] {
        ACK => vec![none(); 3],
        PROBE => vec![u32_at(bytes, 16).to_string(), none(), none()],
        _ => [16, 20, 24].map(|at| u32_at(bytes, at).to_string()).to_vec(),
    };
    let behind = match (bytes[1], bytes[2] & 2) {
        (DATA, 0) => vec![none(), none(), none(), hex(&bytes[64..])],
        (DATA, _) => {
            let (control, payload) = bytes[72..].split_at_checked(bytes[30].into()).unwrap_or_default();
            vec![u32_at(bytes, 64).to_string(), u32_at(bytes, 68).to_string(), hex(control), hex(payload)]
        }
        _ => vec![none(); 4],
    };
    [place, behind].concat()
}

const PROBE_FIELDS: &[&str] = &["highwire.settled", "highwire.padding"];

fn probe(bytes: &[u8]) -> Vec<String> {
    match bytes[1] {
        PROBE => vec![u64_at(bytes, 20).to_string(), hex(&bytes[64..])],
        HELLO => vec![String::new(), hex(&bytes[120..])],
        _ => vec![String::new(); 2],
    }
}

const OFFER_FIELDS: &[&str] = &[
    "highwire.random",
    "highwire.offer.session",
    "highwire.offer.message_bytes_max",
    "highwire.offer.death_ms",
    "highwire.offer.incarnation",
];

fn offer(bytes: &[u8]) -> Vec<String> {
    if bytes[1] > WELCOME {
        return vec![String::new(); OFFER_FIELDS.len()];
    }
    let incarnation = format!("0x{:016x}", u64_at(bytes, 112));
    let numbers = [100, 104, 108].map(|at| u32_at(bytes, at).to_string());
    [vec![hex(&bytes[64..96])], numbers.to_vec(), vec![incarnation]].concat()
}

/// These fields of each packet; None where there is no tshark.
fn tshark(file: &str, fields: &[&str]) -> Option<Vec<Vec<String>>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/highwire.lua");
    let mut command = Command::new("tshark");
    command.arg("-X").arg(format!("lua_script:{}", script.display())).args(["-r", file, "-T", "fields"]);
    command.args(fields.iter().flat_map(|field| ["-e", field]));
    // Nobody's own settings.
    let home = tempfile::tempdir().unwrap();
    let Ok(output) = command.env("HOME", home.path()).env_remove("XDG_CONFIG_HOME").output() else {
        // Not by `eprintln`: the test runner would swallow what is said there.
        let mut loudly = std::io::stderr();
        writeln!(loudly, "SKIPPED, needs tshark: what tools/highwire.lua shows of packets").unwrap();
        return None;
    };
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !complaints.to_lowercase().contains("lua"), "{complaints}");
    let text = String::from_utf8(output.stdout).unwrap();
    // Later versions write flags as words.
    let value = |value: &str| match value {
        "True" => "1".to_owned(),
        "False" => "0".to_owned(),
        other => other.to_owned(),
    };
    Some(text.lines().map(|line| line.split('\t').map(value).collect()).collect())
}

// ── Packets and files ────────────────────────────────────────────────────────────────────────────

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const DATA: u8 = 3;
const ACK: u8 = 4;
const PROBE: u8 = 5;
const CLOSE: u8 = 6;
const FAST: u8 = 7;

/// A plain packet with a right length and checksum, unless other bytes of the header are given.
fn packet(kind: u8, flags: u8, others: &[(usize, u8)], payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[1], bytes[2]) = (1, kind, flags);
    bytes[28..30].copy_from_slice(&(payload.len() as u16).to_le_bytes());
    bytes.extend_from_slice(payload);
    others.iter().filter(|(at, _)| *at < 48).for_each(|&(at, byte)| bytes[at] = byte);
    let checksum = crc32c(&bytes);
    bytes[48..52].copy_from_slice(&checksum.to_le_bytes());
    others.iter().filter(|(at, _)| *at >= 48).for_each(|&(at, byte)| bytes[at] = byte);
    bytes
}

/// Of all but the tag.
fn crc32c(bytes: &[u8]) -> u32 {
    let covered = bytes[..48].iter().chain(&bytes[64..]);
    !covered.fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 })
    })
}

struct Packet {
    /// Whoever sent the first packet sent this one.
    from_first: bool,
    /// What was kept of it, and how long it was.
    bytes: Vec<u8>,
    length: usize,
}

fn read(path: &str) -> Vec<Packet> {
    let file = std::fs::read(path).unwrap();
    assert_eq!((u32_at(&file, 0), u32_at(&file, 20)), (0xa1b2_3c4d, 101));
    let mut packets = Vec::new();
    let (mut at, mut first) = (24, None);
    while at < file.len() {
        let (kept, length) = (u32_at(&file, at + 8) as usize, u32_at(&file, at + 12) as usize);
        let packet = &file[at + 16..at + 16 + kept];
        let (addresses, udp) = if packet[0] == 0x45 { (12..16, 20) } else { (8..24, 40) };
        let sender = (packet[addresses].to_vec(), packet[udp..udp + 2].to_vec());
        let from_first = *first.get_or_insert(sender.clone()) == sender;
        packets.push(Packet { from_first, bytes: packet[udp + 8..].to_vec(), length: length - udp - 8 });
        at += 16 + kept;
    }
    packets
}

/// A file of packets from one address of IPv4 to another.
fn write_file<'a>(path: &str, packets: impl Iterator<Item = &'a [u8]>) {
    let numbers = [0xa1b2_3c4d, 0x0004_0002, 0, 0, 1 << 18, 101u32];
    let mut file: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    for bytes in packets {
        let length = bytes.len() as u16 + 28;
        file.extend([0, 0, length.into(), length.into()].iter().flat_map(|number: &u32| number.to_le_bytes()));
        file.extend([0x45, 0]);
        file.extend(length.to_be_bytes());
        file.extend([0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0x1c, 0xf3, 0x1c, 0xf3]);
        file.extend((length - 20).to_be_bytes());
        file.extend([0, 0]);
        file.extend(bytes);
    }
    std::fs::write(path, file).unwrap();
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// ── Processes ────────────────────────────────────────────────────────────────────────────────────

impl Place {
    fn file(&self, name: &str) -> String {
        self.path().join(name).to_str().unwrap().to_owned()
    }

    /// What the command prints when all goes well.
    fn run(&self, arguments: &[&str]) -> String {
        let done = self.highwire(arguments).assert().code(0);
        String::from_utf8(done.get_output().stdout.clone()).unwrap()
    }
}

fn until(what: &str, mut look: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !look() {
        assert!(Instant::now() < deadline, "after 20 seconds it is still not true that {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
