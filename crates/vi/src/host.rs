//! The path between processes of one host: queues in memory that both map.

pub(crate) mod flight;
pub(crate) mod gather;
pub(crate) mod handover;
pub(crate) mod listener;
pub(crate) mod member;
pub(crate) mod peer;
pub(crate) mod pulse_log;
pub(crate) mod recv;
pub(crate) mod remote;
pub(crate) mod rendezvous;
pub(crate) mod runtime_dir;
pub(crate) mod send;

use crate::bells::{BellHome, QueueShared};
use crate::config::ViOptions;
use crate::member::Member;
use crate::nic::NicInner;
use crate::vi::ViId;
use highwire_mem::{BellIndex, BellRope, Block, News, SlotReader, SlotWriter, Tag};
use member::{HostMember, STATE_ABORTED, STATE_CLOSED, state_word};
use peer::Peer;
use recv::HostReceiver;
use send::{HostSender, LoanBookParts};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What the two halves of a VI are put together from when both sides have agreed.
pub(crate) struct Parts {
    pub peer: Arc<Peer>,
    pub queue: Arc<QueueShared>,
    pub home: Arc<BellHome>,
    pub bell: BellIndex,
    pub block: Block,
    pub peer_block: Block,
    pub first_index: u64,
    pub serial: u32,
    pub rope: BellRope,
}

/// Puts them together.
pub(crate) fn assemble(
    parts: Parts,
    nic: &Arc<NicInner>,
    options: &ViOptions<'_>,
) -> (HostSender, HostReceiver, Arc<HostMember>) {
    let Parts { peer, queue, home, bell, block, peer_block, first_index, serial, rope } = parts;
    let (own, theirs) = (peer.ours().clone(), peer.theirs().clone());
    let writer = SlotWriter::new(own.clone(), block, theirs.clone(), peer_block, first_index, peer.fences);
    let reader = SlotReader::new(own, block, theirs.clone(), peer_block, first_index, peer.fences);
    let loans = LoanBookParts::new(theirs, peer_block);
    let rope = Arc::new(rope);
    let member = Arc::new(HostMember {
        id: ViId::next(),
        process: nic.process,
        slots: reader.watch(),
        credit: writer.watch(),
        releases: loans.watch(),
        peer,
        queue: queue.clone(),
        home,
        bell,
        block,
        peer_block,
        serial,
        sent: AtomicBool::new(false),
        received: AtomicBool::new(false),
        returned: AtomicBool::new(false),
        receivable: AtomicBool::new(false),
        loans_out: AtomicBool::new(false),
        awaiting: AtomicBool::new(false),
        broken: OnceLock::new(),
        aborting: AtomicBool::new(false),
        areas: Mutex::default(),
        sleepers: Mutex::default(),
        active: AtomicBool::new(false),
        muted: AtomicBool::new(false),
        ended: AtomicU32::new(0),
        halves: AtomicU32::new(2),
    });
    member.refresh_attention();
    member.peer.tell(&queue);
    queue.join(Member::Host(member.clone()));
    let tag = options.tag.unwrap_or(Tag(0));
    let tx = HostSender::new(member.clone(), nic.clone(), writer, loans, rope.clone(), options);
    let rx = HostReceiver::new(member.clone(), nic.clone(), reader, rope, tag);
    (tx, rx, member)
}

/// A half is gone; with the last one the connection ends.
fn half_dropped(member: &HostMember, rope: &BellRope) {
    if !member.process.is_this() || !member.half_gone() {
        return;
    }
    member.queue.part(member.id);
    if member.broken.get().is_none() {
        let state = if member.aborting.load(Relaxed) { STATE_ABORTED } else { STATE_CLOSED };
        member.block.set_state(member.peer.ours(), state_word(member.serial, state));
    }
    // Whatever it waits for, it is to know.
    rope.ring(News::End);
    member.queue.return_bell(&member.home, member.bell);
    // Whoever announces something in the block has done so, or sees that it is left.
    drop(member.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
    let areas = std::mem::take(&mut *member.areas.lock().unwrap_or_else(PoisonError::into_inner));
    member.peer.leave(member.block, areas, member.peer_block, member.serial);
}
