//! Two processes and a stream: start it with `listen` in one terminal, then with `connect` in another.

use highwire::{Listener, Stream};
use std::io::{Read, Write};

fn main() -> std::io::Result<()> {
    if std::env::args().nth(1).as_deref() == Some("listen") {
        let (mut stream, _) = Listener::bind("shm:stream")?.accept()?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?; // until the other side shuts down
        stream.write_all(text.to_uppercase().as_bytes())?;
    } else {
        let mut stream = Stream::connect("shm:stream")?; // or udp:host:port, as with std::net
        stream.write_all(b"hello, stream")?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        println!("{answer}");
    }
    Ok(())
}
