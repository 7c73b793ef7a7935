//! Two processes and a message: start it with `listen` in one terminal, then with `connect` in another.

use highwire::{Nic, Receive};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let patience = Duration::from_secs(60);
    let nic = Nic::open()?; // this process's own network interface
    if std::env::args().nth(1).as_deref() == Some("listen") {
        let memory = nic.register(4096)?; // where messages may land
        let mut vi = nic.listen("shm:hello")?.accept(patience)?;
        vi.post_recv(Receive::new(1).into(memory.slice(0..64)?))?; // the buffer goes in by value …
        let done = vi.wait(patience)?;
        let (token, length) = (done.token, done.length);
        let buffer = done.into_buffer().ok_or("it went in with a buffer")?; // … and comes back
        println!("receive {token}: {:?}", String::from_utf8_lossy(&buffer[..length]));
    } else {
        let mut vi = nic.connect("shm:hello")?;
        vi.send_bytes(2, b"hello, wire")?;
        println!("send {}: the other side has it", vi.wait(patience)?.token);
    }
    Ok(())
}
