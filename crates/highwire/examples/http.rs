//! HTTP with hyper over Highwire streams, on one thread.
//!
//! ```text
//! cargo run --release -p highwire --features tokio --example http                       # both sides, once
//! cargo run --release -p highwire --features tokio --example http serve shm:web         # one side …
//! cargo run --release -p highwire --features tokio --example http get shm:web /hello    # … and the other
//! ```
//! `udp:HOST:PORT` instead of `shm:NAME` goes between hosts, with the key that HIGHWIRE_KEY names.

use highwire::{AsyncListener, AsyncStream, Listener, Stream};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::error::Error;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", address] => serve(listen(address)?).await,
        ["get", address, path] => print!("{}", get(address, path).await?.1),
        [] => both().await?,
        _ => return Err("write: http, http serve ADDRESS, or http get ADDRESS PATH".into()),
    }
    Ok(())
}

/// A server, and a client that asks it twice.
async fn both() -> Result<(), Box<dyn Error>> {
    let address = format!("shm:http-{}", std::process::id());
    let server = tokio::spawn(serve(listen(&address)?));
    for path in ["/", "/hello"] {
        // Connecting waits for the listener, which runs on this thread too.
        let (status, text) = get(&address, path).await?;
        print!("GET {path}: {status}\n{text}");
    }
    server.abort();
    Ok(())
}

fn listen(address: &str) -> std::io::Result<AsyncListener> {
    let listener = Listener::bind(address)?;
    println!("listening at {}", listener.local_addr()?);
    AsyncListener::new(listener)
}

/// Answers requests on every stream that comes, until it is stopped.
async fn serve(listener: AsyncListener) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => return eprintln!("no more streams: {error}"),
        };
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            if let Err(error) = connection.serve_connection(TokioIo::new(stream), service_fn(answer)).await {
                eprintln!("a stream broke off: {error}");
            }
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (status, text) = match request.uri().path() {
        "/hello" => (StatusCode::OK, "hello over highwire\n"),
        _ => (StatusCode::NOT_FOUND, "try /hello\n"),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    Ok(response)
}

/// Asks for one page.
async fn get(address: &str, path: &str) -> Result<(StatusCode, String), Box<dyn Error>> {
    let address = address.to_owned();
    let stream = tokio::task::spawn_blocking(move || Stream::connect(&address)).await??;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(AsyncStream::new(stream)?)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::get(path).header("host", "highwire").body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let text = String::from_utf8(response.into_body().collect().await?.to_bytes().into())?;
    drop(sender);
    connection.await??;
    Ok((status, text))
}
