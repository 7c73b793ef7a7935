//! Streams for tokio.

use crate::address::SockAddress;
use crate::listener::Listener;
use crate::stream::Stream;
use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A [`Stream`] with tokio's traits. To be made and used within a runtime that does I/O.
#[derive(Debug)]
pub struct AsyncStream(AsyncFd<Stream>);

impl AsyncStream {
    /// Takes a stream over; it does not wait any more.
    pub fn new(stream: Stream) -> io::Result<AsyncStream> {
        stream.set_nonblocking(true)?;
        stream.try_as_fd()?;
        register(stream).map(AsyncStream)
    }

    /// The stream itself, for its choices and addresses.
    pub fn get_ref(&self) -> &Stream {
        self.0.get_ref()
    }

    /// The stream itself; it does not wait until it is told to.
    pub fn into_inner(self) -> Stream {
        self.0.into_inner()
    }

    fn poll_write_by(
        &self,
        context: &mut Context<'_>,
        write: impl Fn(&Stream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut ready = ready!(self.0.poll_write_ready(context))?;
            if let Ok(written) = ready.try_io(|stream| write(stream.get_ref())) {
                return Poll::Ready(written);
            }
        }
    }
}

impl AsyncRead for AsyncStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(context))?;
            let bytes = into.initialize_unfilled();
            match ready.try_io(|stream| stream.get_ref().read(bytes)) {
                Ok(read) => return Poll::Ready(read.map(|count| into.advance(count))),
                Err(_would_block) => {}
            }
        }
    }
}

impl AsyncWrite for AsyncStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_by(context, |mut stream| stream.write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_by(context, |mut stream| stream.write_vectored(parts))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Nothing is kept back.
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.get_ref().shutdown(Shutdown::Write))
    }
}

/// What is registered here keeps its descriptor open for as long as it lives, which is what tokio asks for.
#[expect(deprecated, reason = "what replaces it is unsafe, and its condition is kept")]
fn register<T: AsRawFd>(of: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::new(of)
}

/// A [`Listener`] for tokio.
#[derive(Debug)]
pub struct AsyncListener(AsyncFd<Listener>);

impl AsyncListener {
    /// Takes a listener over; it does not wait any more.
    pub fn new(listener: Listener) -> io::Result<AsyncListener> {
        listener.set_nonblocking(true)?;
        register(listener).map(AsyncListener)
    }

    /// The listener itself.
    pub fn get_ref(&self) -> &Listener {
        self.0.get_ref()
    }

    /// The next stream, and who called.
    pub async fn accept(&self) -> io::Result<(AsyncStream, SockAddress)> {
        loop {
            let mut ready = self.0.readable().await?;
            if let Ok(accepted) = ready.try_io(|listener| listener.get_ref().accept()) {
                let (stream, from) = accepted?;
                return Ok((AsyncStream::new(stream)?, from));
            }
        }
    }
}
