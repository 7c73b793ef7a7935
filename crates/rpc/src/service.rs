//! Services as Rust traits: [`crate::service!`] makes of one declaration what a server implements and what a client
//! calls.

use crate::client::{Answer, Call, Client, Method, Pending};
use crate::error::{CallError, Failed};
use crate::server::{Reply, Request, Serve};
use highwire_vi::{Buffer, Frozen, Nic, Payload, PeerId, SharedBuffer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::marker::PhantomData;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// Declares a service: a trait for those who serve it, and a type for those who call it.
///
/// Each method has a number, which is on the wire, and says how it may be run ([`Manner`](crate::Manner)): `quick` ones
/// take about a microsecond and run where calls arrive, others on a pool; `repeatable` ones do no harm when they run
/// twice. A method with `&mut bulk` has payloads: see [`Bulk`].
///
/// ```
/// use highwire_rpc::{Bulk, Rpc, Services, service};
/// use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
/// # use highwire_vi::{Config, Nic};
///
/// service! {
///     /// Counts.
///     pub trait Counter, client CounterClient, id 0x0c01_0001, version 1 {
///         /// Adds, and tells the sum.
///         [1, quick] fn add(&self, amount: u64) -> u64;
///         /// Writes the sum into the caller's buffer, as text.
///         [2, repeatable] fn print(&self, &mut bulk, prefix: String) -> bool;
///     }
/// }
///
/// struct Sum(AtomicU64);
///
/// impl Counter for Sum {
///     fn add(&self, amount: u64) -> u64 {
///         self.0.fetch_add(amount, Relaxed) + amount
///     }
///     fn print(&self, bulk: &mut Bulk<'_>, prefix: String) -> bool {
///         let text = format!("{prefix}{}", self.0.load(Relaxed));
///         let Ok(mut buffer) = bulk.nic().register(text.len()).and_then(|region| region.slice(0..text.len())) else {
///             return false;
///         };
///         buffer.copy_from_slice(text.as_bytes());
///         bulk.send(buffer);
///         true
///     }
/// }
///
/// # let place = tempfile::tempdir()?;
/// # let nic = Nic::with(Config { runtime_dir: Some(place.path().to_owned()), ..Config::default() })?;
/// let rpc = Rpc::new(&nic)?;
/// let server = rpc.serve("shm:counter", Services::new().and(CounterClient::serve(Sum(AtomicU64::new(0)))))?;
///
/// let counter = CounterClient::new(rpc.connect("shm:counter")?);
/// assert_eq!(counter.add(40).wait()?, 40);
/// let two = counter.add(2).start();
/// assert_eq!(two.wait()?.value, 42);
/// let room = nic.register(4096)?.slice(0..4096)?;
/// let printed = counter.print("the sum is ".into()).into(room).complete()?;
/// assert_eq!(&printed.into_buffer().unwrap()[..], b"the sum is 42");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[macro_export]
macro_rules! service {
    (
        $(#[$about:meta])*
        $visible:vis trait $service:ident, client $client:ident, id $id:literal, version $version:literal {
            $(
                $(#[$what:meta])*
                [$number:literal $(, $manner:ident)*]
                fn $name:ident(&self $(, &mut $bulk:ident)? $(, $argument:ident: $type:ty)* $(,)?) $(-> $result:ty)?;
            )*
        }
    ) => {
        $(#[$about])*
        $visible trait $service: ::core::marker::Send + ::core::marker::Sync + 'static {
            $(
                $(#[$what])*
                fn $name(&self $(, $bulk: &mut $crate::Bulk<'_>)? $(, $argument: $type)*) $(-> $result)?;
            )*
        }

        #[doc = concat!("Calls [`", stringify!($service), "`].")]
        #[derive(Clone, Debug)]
        $visible struct $client($crate::Client);

        impl $client {
            /// The service's number.
            pub const ID: u32 = $id;
            /// Its version.
            pub const VERSION: u16 = $version;

            /// Calls by way of this connection.
            pub fn new(client: $crate::Client) -> $client {
                $client(client)
            }

            /// The connection.
            pub fn client(&self) -> &$crate::Client {
                &self.0
            }

            /// What a server has to offer the service with `serving`.
            pub fn serve(serving: impl $service) -> $crate::Service {
                struct Dispatch<T>(T);

                impl<T: $service> $crate::Serve for Dispatch<T> {
                    #[inline]
                    fn manner(&self, method: u16) -> ::core::option::Option<$crate::Manner> {
                        match method {
                            $($number => ::core::option::Option::Some($crate::Manner::default()$(.$manner())*),)*
                            _ => ::core::option::Option::None,
                        }
                    }

                    #[inline]
                    fn serve(&self, request: $crate::Request<'_>, reply: &mut $crate::Reply) {
                        match request.method() {
                            $($number => {
                                let ::core::option::Option::Some(($($argument,)*)) = request.decode::<($($type,)*)>() else {
                                    return reply.bad_arguments();
                                };
                                $(let $bulk = &mut $crate::Bulk::new(request, reply);)?
                                let result = self.0.$name($($bulk,)? $($argument),*);
                                reply.encode(&result);
                            })*
                            _ => reply.unknown_method(),
                        }
                    }
                }

                $crate::Service::new(Self::ID, Self::VERSION, Dispatch(serving))
            }

            $(
                $(#[$what])*
                pub fn $name(&self $(, $argument: $type)*) -> $crate::TypedCall<'_, $crate::service!(@result $($result)?)> {
                    let method = $crate::Method { service: Self::ID, version: Self::VERSION, method: $number };
                    $crate::TypedCall::new(&self.0, method, &($(&$argument,)*))
                }
            )*
        }
    };
    (@result) => { () };
    (@result $result:ty) => { $result };
}

/// A service and who serves it.
#[derive(Clone)]
pub struct Service {
    pub(crate) id: u32,
    pub(crate) version: u16,
    pub(crate) serve: Arc<dyn Serve>,
}

impl Service {
    /// A service by its number and version.
    pub fn new(id: u32, version: u16, serve: impl Serve) -> Service {
        Service { id, version, serve: Arc::new(serve) }
    }
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Service({:#010x}, version {})", self.id, self.version)
    }
}

/// The payloads of a call, to whoever runs it.
#[derive(Debug)]
pub struct Bulk<'a> {
    request: Request<'a>,
    reply: &'a mut Reply,
}

impl<'a> Bulk<'a> {
    /// Of this call.
    pub fn new(request: Request<'a>, reply: &'a mut Reply) -> Bulk<'a> {
        Bulk { request, reply }
    }

    /// The payload that came.
    pub fn payload(&self) -> &[u8] {
        self.request.payload()
    }

    /// The frame that it landed in, and where in it: once. It returns to the server's pool when it is dropped.
    pub fn take_payload(&mut self) -> Option<(Buffer, Range<usize>)> {
        self.request.take_payload()
    }

    /// Bytes of room that the caller has for the answer's.
    pub fn room(&self) -> usize {
        self.request.room()
    }

    /// Who calls.
    pub fn peer(&self) -> PeerId {
        self.request.peer()
    }

    /// The server's interface, for buffers.
    pub fn nic(&self) -> &Nic {
        self.request.nic()
    }

    /// Adds a piece to the answer's payload, which lands where the caller said. Beside a payload the result has at most
    /// 92 bytes.
    pub fn send(&mut self, buffer: Buffer) {
        self.reply.payload(buffer);
    }

    /// Adds a piece that other answers may carry too.
    pub fn send_shared(&mut self, buffer: SharedBuffer) {
        self.reply.shared(buffer);
    }

    /// Adds a range of a frozen region. Panics if it is not inside.
    pub fn send_frozen(&mut self, region: &Frozen, range: Range<usize>) {
        self.reply.frozen(region, range);
    }
}

/// Encoded arguments, without an allocation while they are short.
#[derive(Debug)]
enum Arguments {
    Short([u8; SHORT_BYTES], u8),
    Long(Vec<u8>),
}

/// What rides in the first slot of a message.
const SHORT_BYTES: usize = 128;

impl Arguments {
    #[inline]
    fn new<A: Serialize>(arguments: &A) -> Arguments {
        let mut short = [0; SHORT_BYTES];
        match postcard::to_slice(arguments, &mut short).map(|written| written.len()) {
            Ok(length) => Arguments::Short(short, length as u8),
            // Longer, or not to be encoded at all: then the server says that it cannot decode it.
            Err(_) => Arguments::Long(postcard::to_allocvec(arguments).unwrap_or_default()),
        }
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Arguments::Short(bytes, length) => &bytes[..usize::from(*length)],
            Arguments::Long(bytes) => bytes,
        }
    }
}

/// A call of a service's method that is being put together; `T` is what it returns.
#[derive(Debug)]
#[must_use = "a call is made by `wait`, `complete`, `start` or `then`"]
pub struct TypedCall<'a, T> {
    call: Call<'a>,
    arguments: Arguments,
    result: PhantomData<fn() -> T>,
}

/// What a method returned, and the call's buffers.
#[derive(Debug)]
pub struct Completed<T> {
    /// What it returned.
    pub value: T,
    /// The room that was named, with the answer's payload in it.
    pub payload: Payload,
    /// Bytes of that payload.
    pub length: usize,
    /// The payload that was sent.
    pub sent: Payload,
}

impl<T> Completed<T> {
    /// The first buffer of the room that was named, cut to what has landed there.
    pub fn into_buffer(self) -> Option<Buffer> {
        crate::client::first_buffer(self.payload, self.length)
    }
}

impl<'a, T: DeserializeOwned> TypedCall<'a, T> {
    /// A call of `method` with these arguments, a tuple.
    #[inline]
    pub fn new<A: Serialize>(client: &'a Client, method: Method, arguments: &A) -> TypedCall<'a, T> {
        TypedCall { call: client.call(method), arguments: Arguments::new(arguments), result: PhantomData }
    }

    fn map(self, change: impl FnOnce(Call<'a>) -> Call<'a>) -> TypedCall<'a, T> {
        TypedCall { call: change(self.call), ..self }
    }

    /// Adds a piece of payload, which comes back with the answer.
    pub fn payload(self, buffer: Buffer) -> TypedCall<'a, T> {
        self.map(|call| call.payload(buffer))
    }

    /// Adds a piece of payload that others may send too.
    pub fn shared(self, buffer: SharedBuffer) -> TypedCall<'a, T> {
        self.map(|call| call.shared(buffer))
    }

    /// Adds a range of a frozen region. Panics if it is not inside.
    pub fn frozen(self, region: &Frozen, range: Range<usize>) -> TypedCall<'a, T> {
        self.map(|call| call.frozen(region, range))
    }

    /// The answer's payload lands in `buffer`; several are filled in the order given.
    pub fn into(self, buffer: Buffer) -> TypedCall<'a, T> {
        self.map(|call| call.into(buffer))
    }

    /// Gives up after so long.
    pub fn deadline(self, after: Duration) -> TypedCall<'a, T> {
        self.map(|call| call.deadline(after))
    }

    /// Makes the call and waits for what it returns. Its buffers return to where they came from.
    #[inline]
    pub fn wait(self) -> Result<T, CallError> {
        match self.complete() {
            Ok(completed) => Ok(completed.value),
            Err(failed) => Err(failed.error),
        }
    }

    /// Makes the call and waits for what it returns, and for its buffers.
    #[inline]
    pub fn complete(self) -> Result<Completed<T>, Failed> {
        let TypedCall { call, arguments, .. } = self;
        call.with_arguments(arguments.bytes()).wait().and_then(decode)
    }

    /// Makes the call and goes on: await it, or wait for it later.
    pub fn start(self) -> TypedPending<T> {
        let TypedCall { call, arguments, .. } = self;
        TypedPending { pending: call.with_arguments(arguments.bytes()).start(), result: PhantomData }
    }

    /// Makes the call and has `continuation` run with what comes of it: see [`Call::then`].
    pub fn then(self, continuation: impl FnOnce(Result<Completed<T>, Failed>) + Send + 'static) {
        let TypedCall { call, arguments, .. } = self;
        call.with_arguments(arguments.bytes()).then(|outcome| continuation(outcome.and_then(decode)));
    }
}

#[inline]
fn decode<T: DeserializeOwned>(answer: Answer) -> Result<Completed<T>, Failed> {
    let Answer { body, payload, length, sent } = answer;
    match postcard::take_from_bytes(&body) {
        Ok((value, [])) => Ok(Completed { value, payload, length, sent }),
        _ => Err(Failed { error: CallError::BadResult, sent, room: payload }),
    }
}

/// A call on its way. Await it, or wait for it; dropped, it is given up.
#[derive(Debug)]
#[must_use = "dropped, the call is given up"]
pub struct TypedPending<T> {
    pending: Pending,
    result: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> TypedPending<T> {
    /// Waits for what it returns.
    pub fn wait(self) -> Result<Completed<T>, Failed> {
        self.pending.wait().and_then(decode)
    }

    /// Gives it up: see [`Pending::cancel`].
    pub fn cancel(self) -> Result<Completed<T>, Failed> {
        self.pending.cancel().and_then(decode)
    }
}

impl<T: DeserializeOwned> Future for TypedPending<T> {
    type Output = Result<Completed<T>, Failed>;

    fn poll(mut self: Pin<&mut TypedPending<T>>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.pending).poll(context).map(|outcome| outcome.and_then(decode))
    }
}
