//! tonic: gRPC over HTTP/2. The service is written by hand, as `tonic-build` would write it, so that nobody needs `protoc`.

use super::{Failure, VALUE_BYTES_MAX};
use bytes::Bytes;
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::server::UnaryService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;
use tower_service::Service;

/// What is asked for.
#[derive(Clone, PartialEq, prost::Message)]
struct Wanted {
    #[prost(uint32, tag = "1")]
    size: u32,
}

/// The answer.
#[derive(Clone, PartialEq, prost::Message)]
struct Value {
    #[prost(bytes = "bytes", tag = "1")]
    bytes: Bytes,
}

/// The service, which has one method.
#[derive(Clone)]
struct Values(Bytes);

impl Service<http::Request<Body>> for Values {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let fetch = Fetch(self.0.clone());
        Box::pin(async move {
            let codec = ProstCodec::<Value, Wanted>::default();
            Ok(tonic::server::Grpc::new(codec).unary(fetch, request).await)
        })
    }
}

/// That method.
struct Fetch(Bytes);

impl UnaryService<Wanted> for Fetch {
    type Response = Value;
    type Future = Ready<Result<Response<Value>, Status>>;

    fn call(&mut self, request: Request<Wanted>) -> Self::Future {
        let size = request.into_inner().size as usize;
        ready(match size <= self.0.len() {
            true => Ok(Response::new(Value { bytes: self.0.slice(..size) })),
            false => Err(Status::out_of_range("there is no such value")),
        })
    }
}

pub(crate) async fn serve(listener: TcpListener, value: Bytes) -> Result<(), Failure> {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Ok(Server::builder().serve_with_incoming(Values(value), incoming).await?)
}

/// One channel, which has one connection.
#[derive(Clone)]
pub(crate) struct Client(tonic::client::Grpc<Channel>);

pub(crate) async fn connect(port: u16) -> Result<Client, Failure> {
    let channel = Channel::from_shared(format!("http://127.0.0.1:{port}"))?.tcp_nodelay(true).connect().await?;
    // A message is a little longer than its value.
    Ok(Client(tonic::client::Grpc::new(channel).max_decoding_message_size(2 * VALUE_BYTES_MAX)))
}

impl Client {
    pub(crate) async fn fetch(&mut self, size: u32) -> Result<Bytes, Failure> {
        self.0.ready().await?;
        let codec = ProstCodec::<Wanted, Value>::default();
        let answer = self.0.unary(Request::new(Wanted { size }), PathAndQuery::from_static(METHOD), codec).await?;
        Ok(answer.into_inner().bytes)
    }
}

const METHOD: &str = "/highwire.Values/Fetch";
