//! tarpc over TCP, with the transport that its documentation shows: frames of bincode.

use super::{Failure, VALUE_BYTES_MAX};
use bytes::Bytes;
use futures::StreamExt;
use std::net::Ipv4Addr;
use tarpc::serde_transport::Transport;
use tarpc::server::{BaseChannel, Channel};
use tarpc::tokio_serde::formats::Bincode;
use tarpc::tokio_util::codec::LengthDelimitedCodec;
use tarpc::{ClientMessage, Response, client, context};
use tokio::net::{TcpListener, TcpStream};

#[tarpc::service]
trait Values {
    /// The first so many bytes of the value.
    async fn fetch(size: u32) -> Bytes;
}

#[derive(Clone)]
struct Server(Bytes);

impl Values for Server {
    async fn fetch(self, _: context::Context, size: u32) -> Bytes {
        self.0.slice(..self.0.len().min(size as usize))
    }
}

pub(crate) async fn serve(listener: TcpListener, value: Bytes) -> Result<(), Failure> {
    loop {
        let (stream, _) = listener.accept().await?;
        let transport: Transport<_, ClientMessage<ValuesRequest>, Response<ValuesResponse>, _> =
            tarpc::serde_transport::new(frames(stream)?, Bincode::default());
        let answers = BaseChannel::with_defaults(transport).execute(Server(value.clone()).serve());
        tokio::spawn(answers.for_each(|answer| async {
            tokio::spawn(answer);
        }));
    }
}

type Frames = tarpc::tokio_util::codec::Framed<TcpStream, LengthDelimitedCodec>;

fn frames(stream: TcpStream) -> Result<Frames, Failure> {
    stream.set_nodelay(true)?;
    // A frame is a little longer than its value.
    let codec = LengthDelimitedCodec::builder().max_frame_length(2 * VALUE_BYTES_MAX).new_codec();
    Ok(Frames::new(stream, codec))
}

#[derive(Clone)]
pub(crate) struct Client(ValuesClient);

pub(crate) async fn connect(port: u16) -> Result<Client, Failure> {
    let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    let transport = tarpc::serde_transport::new(frames(stream)?, Bincode::default());
    Ok(Client(ValuesClient::new(client::Config::default(), transport).spawn()))
}

impl Client {
    pub(crate) async fn fetch(&mut self, size: u32) -> Result<Bytes, Failure> {
        Ok(self.0.fetch(context::current(), size).await?)
    }
}
