//! The clients of `bench apps`: what they are asked to do, and what they say about it.

use super::servers::{App, ftp_name, value_key};
use crate::launch::{self, Ended, Way, finish};
use crate::stats::Measure;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What one run of a client has found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// The figure, in the unit of its measure.
    pub(crate) value: f64,
    /// How many requests there were, or gigabytes.
    pub(crate) amount: f64,
    pub(crate) latency_p99_us: Option<f64>,
}

/// Somebody who asks a server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Client<'a> {
    pub(crate) measure: Measure,
    pub(crate) size: usize,
    pub(crate) port: u16,
    pub(crate) way: Way,
    pub(crate) cpu: usize,
    /// Our own client of memcached.
    pub(crate) memcached_get: &'a Path,
    /// Our own of a server with threads.
    pub(crate) threads: &'a Path,
    /// Where files may be made.
    pub(crate) place: &'a Path,
}

impl Client<'_> {
    /// One run; redis is asked `requests` times, the others for as long as they please. What it found, and CPU seconds
    /// of it.
    pub(crate) fn run(&self, requests: usize) -> Result<(Outcome, f64), String> {
        let program = self.program().ok_or_else(|| App::of(self.measure).missing().unwrap_or_default())?;
        let began = Instant::now();
        let child = launch::command_as(App::of(self.measure).user(), self.way, self.cpu, &program)
            .map_err(|error| error.to_string())?
            .args(self.arguments(requests))
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let Ended { output, cpu_seconds } = finish(child, PATIENCE)?;
        if App::of(self.measure) == App::Socat {
            return Ok((self.echoed(began.elapsed())?, cpu_seconds));
        }
        let outcome = self.parse(&output, requests).ok_or_else(|| {
            let beginning: String = output.chars().take(QUOTED_MAX).collect();
            format!("not understood: {beginning:?}")
        })?;
        Ok((outcome, cpu_seconds))
    }

    fn program(&self) -> Option<PathBuf> {
        match App::of(self.measure) {
            App::Redis => launch::find("redis-benchmark"),
            App::Nginx | App::Haproxy => launch::find("wrk"),
            App::Vsftpd => launch::find("curl"),
            App::Iperf3 => launch::find("iperf3"),
            App::Memcached => Some(self.memcached_get.to_owned()),
            App::Postgres => super::postgres::program("pgbench"),
            App::Threads => Some(self.threads.to_owned()),
            App::Socat => launch::find("socat"),
        }
    }

    fn arguments(&self, requests: usize) -> Vec<String> {
        let Client { measure, size, port, .. } = *self;
        let mut more = Vec::new();
        let line = match measure {
            Measure::NginxC1Rps | Measure::NginxC32Rps | Measure::NginxCloseRps => {
                if measure == Measure::NginxCloseRps {
                    more = vec!["-H".to_owned(), "Connection: close".to_owned()];
                }
                let connections = if measure == Measure::NginxC1Rps { 1 } else { 32 };
                format!("-t1 -c{connections} -d{SECONDS}s --latency http://127.0.0.1:{port}/{size}")
            }
            Measure::FtpCurlMbS => {
                more = vec!["--write-out".to_owned(), "%{size_download} %{time_total}".to_owned()];
                let name = ftp_name(size);
                format!("--silent --show-error --output /dev/null ftp://127.0.0.1:{port}/{name}")
            }
            Measure::Iperf3GbS => format!("--client 127.0.0.1 --port {port} --time {SECONDS} --length {size} --json"),
            Measure::MemcachedGetC1Rps => format!("{port} {size} {}", TRIAL.as_millis()),
            Measure::HaproxyC16Rps => format!("-t1 -c16 -d{SECONDS}s --latency http://127.0.0.1:{port}/{size}"),
            Measure::PgbenchTpcbC10Tps => format!("{} -c 10 postgres", self.pgbench()),
            Measure::PgbenchSelectC1Tps => format!("{} -c 1 --select-only postgres", self.pgbench()),
            Measure::Threads2000Rps => format!("ask {port} 2000 {}", TRIAL.as_millis()),
            Measure::Echo64mMbS => {
                let [sent, received] = [ECHO_SENT, ECHO_RECEIVED].map(|name| self.place.join(name));
                let (sent, received) = (sent.display(), received.display());
                format!("-t 10 OPEN:{sent},rdonly!!OPEN:{received},creat,trunc,wronly TCP:127.0.0.1:{port}")
            }
            _ => {
                let connections =
                    if matches!(measure, Measure::RedisGetC1Rps | Measure::RedisSetC1Rps) { 1 } else { 50 };
                let pipeline = if measure == Measure::RedisGetC50P16Rps { 16 } else { 1 };
                let command = match measure {
                    Measure::RedisSetC1Rps => format!("-t set -d {size}"),
                    _ => format!("GET {}", value_key(size)),
                };
                format!("-h 127.0.0.1 -p {port} -c {connections} -P {pipeline} -n {requests} --csv {command}")
            }
        };
        // What has a space in it goes first: some take everything after an address for another one.
        more.into_iter().chain(line.split_whitespace().map(str::to_owned)).collect()
    }

    fn parse(&self, output: &str, requests: usize) -> Option<Outcome> {
        match App::of(self.measure) {
            App::Redis => parse_redis(output, requests),
            App::Nginx | App::Haproxy => parse_wrk(output),
            App::Vsftpd => parse_curl(output, self.size),
            App::Iperf3 => parse_iperf3(output),
            App::Memcached | App::Threads => parse_memcached(output),
            App::Postgres => parse_pgbench(output),
            App::Socat => None,
        }
    }

    fn pgbench(&self) -> String {
        let user = super::postgres::USER;
        format!("--no-vacuum -h 127.0.0.1 -p {} -U {user} -T {SECONDS} -j 1", self.port)
    }

    /// What an echo is worth; nothing if another file came back.
    fn echoed(&self, elapsed: Duration) -> Result<Outcome, String> {
        let [sent, received] = [ECHO_SENT, ECHO_RECEIVED].map(|name| std::fs::read(self.place.join(name)));
        let (sent, received) = (sent.map_err(|error| error.to_string())?, received.map_err(|error| error.to_string())?);
        if sent != received {
            return Err(format!("{} of {} bytes came back, or others", received.len(), sent.len()));
        }
        let bytes = sent.len() as f64;
        Ok(Outcome { value: bytes / 1e6 / elapsed.as_secs_f64(), amount: bytes / 1e9, latency_p99_us: None })
    }
}

/// What pgbench says at its end; nothing if a transaction failed.
fn parse_pgbench(output: &str) -> Option<Outcome> {
    let after = |head: &str| output.lines().find_map(|line| line.trim().strip_prefix(head));
    let first = |text: &str| text.split_whitespace().next()?.split('/').next()?.parse::<f64>().ok();
    if first(after("number of failed transactions:")?)? > 0.0 {
        return None;
    }
    let amount = first(after("number of transactions actually processed:")?)?;
    Some(Outcome { value: first(after("tps =")?)?, amount, latency_p99_us: None })
}

/// The table of `redis-benchmark --csv`.
fn parse_redis(output: &str, requests: usize) -> Option<Outcome> {
    let mut lines = output.lines().skip_while(|line| !line.starts_with("\"test\""));
    let (heads, values) = (lines.next()?, lines.next()?);
    let value = |name: &str| -> Option<f64> {
        let place = heads.split(',').position(|head| head.trim_matches('"') == name)?;
        values.split(',').nth(place)?.trim_matches('"').parse().ok()
    };
    let latency_p99_us = Some(1e3 * value("p99_latency_ms")?);
    Some(Outcome { value: value("rps")?, amount: requests as f64, latency_p99_us })
}

/// What `wrk --latency` prints; nothing if a request failed.
fn parse_wrk(output: &str) -> Option<Outcome> {
    if output.contains("Non-2xx") || output.contains("Socket errors") {
        return None;
    }
    let after = |head: &str| output.lines().find_map(|line| line.trim().strip_prefix(head));
    let requests = output.lines().find_map(|line| line.trim().split_once(" requests in "))?.0;
    Some(Outcome {
        value: after("Requests/sec:")?.trim().parse().ok()?,
        amount: requests.parse().ok()?,
        latency_p99_us: Some(microseconds(after("99%")?.trim())?),
    })
}

/// A duration as wrk writes it: `12.00us`, `1.50ms`, `2.00s`.
fn microseconds(text: &str) -> Option<f64> {
    for (unit, factor) in [("us", 1.0), ("ms", 1e3), ("s", 1e6), ("m", 6e7)] {
        if let Some(number) = text.strip_suffix(unit).and_then(|number| number.parse::<f64>().ok()) {
            return Some(number * factor);
        }
    }
    None
}

/// Bytes and seconds; nothing if that is not the whole file.
fn parse_curl(output: &str, size: usize) -> Option<Outcome> {
    let (bytes, seconds) = output.trim().split_once(' ')?;
    let (bytes, seconds): (f64, f64) = (bytes.parse().ok()?, seconds.parse().ok()?);
    let whole = bytes == size as f64;
    whole.then_some(Outcome { value: bytes / 1e6 / seconds, amount: bytes / 1e9, latency_p99_us: None })
}

/// What the receiving end of iperf3 has received.
fn parse_iperf3(output: &str) -> Option<Outcome> {
    let json: Value = serde_json::from_str(output).ok()?;
    let received = &json["end"]["sum_received"];
    let (bytes, bits_per_second) = (received["bytes"].as_f64()?, received["bits_per_second"].as_f64()?);
    Some(Outcome { value: bits_per_second / 8e9, amount: bytes / 1e9, latency_p99_us: None })
}

/// Requests, nanoseconds, and the 99th percentile of one request.
fn parse_memcached(output: &str) -> Option<Outcome> {
    let numbers: Vec<f64> = output.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let [requests, nanoseconds, p99_ns] = numbers[..] else { return None };
    let latency_p99_us = Some(p99_ns / 1e3);
    Some(Outcome { value: 1e9 * requests / nanoseconds, amount: requests, latency_p99_us })
}

/// How long a trial is to take, where that can be chosen.
pub(crate) const TRIAL: Duration = Duration::from_millis(400);
/// The same of those who count in whole seconds.
pub(crate) const SECONDS: u64 = 1;
/// Files of the echo.
pub(crate) const ECHO_SENT: &str = "echo-sent";
const ECHO_RECEIVED: &str = "echo-received";
/// How much of what nobody understands is quoted.
const QUOTED_MAX: usize = 400;
/// Whoever takes longer is stuck.
const PATIENCE: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    fn client(measure: Measure, size: usize) -> Client<'static> {
        let [memcached_get, threads, place] = ["memcached_get", "threads", "/place"].map(Path::new);
        Client { measure, size, port: 4711, way: Way::Plain, cpu: 1, memcached_get, threads, place }
    }

    #[test]
    fn each_is_asked_for_what_its_measure_says() {
        let line = |measure, size| client(measure, size).arguments(1000).join(" ");
        let redis = "-h 127.0.0.1 -p 4711 -c 50 -P 16 -n 1000 --csv GET value:8192";
        assert_eq!(line(Measure::RedisGetC50P16Rps, 8192), redis);
        assert!(line(Measure::RedisSetC1Rps, 3).ends_with("-c 1 -P 1 -n 1000 --csv -t set -d 3"));
        assert!(line(Measure::NginxCloseRps, 612).starts_with("-H Connection: close -t1 -c32"));
        assert!(!line(Measure::NginxC1Rps, 612).contains("close"));
        assert!(line(Measure::FtpCurlMbS, 64).ends_with("ftp://127.0.0.1:4711/64-bytes"));
        assert_eq!(line(Measure::MemcachedGetC1Rps, 100), "4711 100 400");
        assert_eq!(line(Measure::Threads2000Rps, 0), "ask 4711 2000 400");
        assert!(line(Measure::PgbenchSelectC1Tps, 0).ends_with("-c 1 --select-only postgres"));
        assert!(
            line(Measure::PgbenchTpcbC10Tps, 0).contains("-p 4711")
                && !line(Measure::PgbenchTpcbC10Tps, 0).contains("select")
        );
        let echo =
            "-t 10 OPEN:/place/echo-sent,rdonly!!OPEN:/place/echo-received,creat,trunc,wronly TCP:127.0.0.1:4711";
        assert_eq!(line(Measure::Echo64mMbS, 0), echo);
        assert!(
            line(Measure::HaproxyC16Rps, 612).contains("-c16")
                && line(Measure::HaproxyC16Rps, 612).ends_with(":4711/612")
        );
    }

    #[test]
    fn what_pgbench_says_counts_only_if_no_transaction_failed() {
        let output = "number of transactions actually processed: 2000\nnumber of failed transactions: 0 (0.000%)\n\
             latency average = 0.500 ms\ntps = 1987.654321 (without initial connection time)\n";
        let expected = Outcome { value: 1987.654321, amount: 2000.0, latency_p99_us: None };
        assert_eq!(client(Measure::PgbenchSelectC1Tps, 0).parse(output, 0), Some(expected));
        assert_eq!(parse_pgbench(&output.replace("transactions: 0", "transactions: 3")), None);
        assert_eq!(parse_pgbench("pgbench: error: connection failed"), None);
    }

    #[test]
    fn what_redis_benchmark_says_is_read_by_its_heads() {
        let output = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
             \"GET value:3\",\"21505.38\",\"0.042\",\"0.024\",\"0.071\",\"0.535\"\n";
        let expected = Outcome { value: 21505.38, amount: 1000.0, latency_p99_us: Some(71.0) };
        assert_eq!(client(Measure::RedisGetC1Rps, 3).parse(output, 1000), Some(expected));
        assert_eq!(parse_redis("Could not connect", 1000), None);
    }

    #[test]
    fn what_wrk_says_counts_only_if_nothing_failed() {
        let output = "Running 1s test @ http://127.0.0.1:80/\n  Latency Distribution\n     50%   31.00us\n     \
             99%    1.50ms\n  31000 requests in 1.10s, 25.00MB read\nRequests/sec:  28181.82\nTransfer/sec:  22.7MB\n";
        let expected = Outcome { value: 28181.82, amount: 31000.0, latency_p99_us: Some(1500.0) };
        assert_eq!(client(Measure::NginxC1Rps, 612).parse(output, 0), Some(expected));
        for failed in ["  Non-2xx or 3xx responses: 3\n", "  Socket errors: connect 1, read 0\n"] {
            assert_eq!(parse_wrk(&(output.to_owned() + failed)), None);
        }
        assert_eq!([microseconds("2.00s"), microseconds("7us"), microseconds("fast")], [Some(2e6), Some(7.0), None]);
    }

    #[test]
    fn bytes_count_only_if_all_arrived() {
        let expected = Outcome { value: 500.0, amount: 1.0, latency_p99_us: None };
        assert_eq!(client(Measure::FtpCurlMbS, 1_000_000_000).parse("1000000000 2.0", 0), Some(expected));
        assert_eq!(parse_curl("999999999 2.0", 1_000_000_000), None);
        let iperf3 = r#"{"end": {"sum_received": {"bytes": 2000000000, "bits_per_second": 1.6e10}}}"#;
        let expected = Outcome { value: 2.0, amount: 2.0, latency_p99_us: None };
        assert_eq!(client(Measure::Iperf3GbS, 131_072).parse(iperf3, 0), Some(expected));
        assert_eq!(parse_iperf3(r#"{"error": "unable to connect"}"#), None);
        let expected = Outcome { value: 25_000.0, amount: 10_000.0, latency_p99_us: Some(60.0) };
        assert_eq!(client(Measure::MemcachedGetC1Rps, 100).parse("10000 400000000 60000\n", 0), Some(expected));
        assert_eq!(parse_memcached("10000 400000000"), None);
    }
}
