//! Copies between memory of this thread's own and memory that others read and write meanwhile.
//!
//! A plain copy of such memory would be a data race, and the compiler may assume that there is none: it could leave out a
//! write, or read twice. So the accesses to the shared side are instructions, of which the compiler knows no more than that
//! they happen, once and in this order. To the rest of the program they are what a peer's process does to the same memory:
//! bytes change at any time, and what is read is any mixture of old and new. Everything in this crate that touches mapped
//! memory is made for that. The side that is the thread's own is read and written as usual, so that values which are in
//! registers stay there.

#[cfg(target_arch = "aarch64")]
use aarch64::*;
#[cfg(target_arch = "x86_64")]
use x86_64::*;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("copies of memory that others use meanwhile are written for x86-64 and AArch64 only");

/// Copies shared bytes to memory of this thread's own, without a call for the lengths that small messages have.
///
/// # Safety
///
/// Both ranges are valid for `len` bytes and do not overlap. Nothing else uses `to` meanwhile.
#[inline(always)]
pub(crate) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    /// Writes the first and the last `T` of the range, which overlap in the middle.
    ///
    /// # Safety
    ///
    /// `to` is valid for `len` bytes, which are between one and two times the size of `T`.
    #[inline(always)]
    unsafe fn put<T>(to: *mut u8, len: usize, (first, last): (T, T)) {
        // SAFETY: both places are inside the range, by the length.
        unsafe {
            to.cast::<T>().write_unaligned(first);
            to.add(len - size_of::<T>()).cast::<T>().write_unaligned(last);
        }
    }
    // SAFETY: each arm has the length that it needs.
    unsafe {
        match len {
            0 => {}
            1..4 => (*to, *to.add(len / 2), *to.add(len - 1)) = load_bytes(from, len),
            4..8 => put(to, len, load_four(from, len)),
            8..16 => put(to, len, load_eight(from, len)),
            16..=32 => put(to, len, load_sixteen(from, len)),
            _ => copy_long(from, to, len),
        }
    }
}

/// Copies bytes of this thread's own to shared memory, without a call for the lengths that small messages have.
///
/// # Safety
///
/// Both ranges are valid for `len` bytes and do not overlap. Nothing else writes `from` meanwhile.
#[inline(always)]
pub(crate) unsafe fn copy_in(from: *const u8, to: *mut u8, len: usize) {
    /// Reads the first and the last `T` of the range, which overlap in the middle.
    ///
    /// # Safety
    ///
    /// `from` is valid for `len` bytes, which are between one and two times the size of `T`.
    #[inline(always)]
    unsafe fn take<T>(from: *const u8, len: usize) -> (T, T) {
        // SAFETY: both places are inside the range, by the length.
        unsafe {
            let last = from.add(len - size_of::<T>());
            (from.cast::<T>().read_unaligned(), last.cast::<T>().read_unaligned())
        }
    }
    // SAFETY: each arm has the length that it needs.
    unsafe {
        match len {
            0 => {}
            1..4 => store_bytes(to, len, (*from, *from.add(len / 2), *from.add(len - 1))),
            4..8 => store_four(to, len, take(from, len)),
            8..16 => store_eight(to, len, take(from, len)),
            16..=32 => store_sixteen(to, len, take(from, len)),
            // Not so when they are copied out: small messages in a row then take a fifth longer than by a call.
            33..=64 => {
                let (first, last) = (take(from, 32), take(from.add(len - 32), 32));
                store_sixteen(to, 32, first);
                store_sixteen(to.add(len - 32), 32, last);
            }
            _ => copy_long(from, to, len),
        }
    }
}

// What follows reads or writes nothing but the range that it is given: the first, the middle and the last of 1 to 3 bytes, or
// the first and the last word of a range of one to two times its size.

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;
    use std::arch::x86_64::__m128i;

    #[inline(always)]
    pub(super) unsafe fn load_bytes(at: *const u8, len: usize) -> (u8, u8, u8) {
        let (first, middle, last): (u32, u32, u32);
        // SAFETY: the caller's range.
        unsafe {
            asm!(
                "movzx {first:e}, byte ptr [{at}]",
                "movzx {middle:e}, byte ptr [{at} + {half}]",
                "movzx {last:e}, byte ptr [{at} + {len} - 1]",
                at = in(reg) at, half = in(reg) len / 2, len = in(reg) len,
                first = out(reg) first, middle = out(reg) middle, last = lateout(reg) last,
                options(nostack, preserves_flags, readonly)
            );
        }
        (first as u8, middle as u8, last as u8)
    }

    #[inline(always)]
    pub(super) unsafe fn store_bytes(at: *mut u8, len: usize, (first, middle, last): (u8, u8, u8)) {
        // SAFETY: the caller's range.
        unsafe {
            asm!(
                "mov byte ptr [{at}], {first}",
                "mov byte ptr [{at} + {half}], {middle}",
                "mov byte ptr [{at} + {len} - 1], {last}",
                at = in(reg) at, half = in(reg) len / 2, len = in(reg) len,
                first = in(reg_byte) first, middle = in(reg_byte) middle, last = in(reg_byte) last,
                options(nostack, preserves_flags)
            );
        }
    }

    macro_rules! ends {
        ($load:ident, $store:ident, $word:ty, $class:ident, [$first_in:literal, $last_in:literal], [$first_out:literal, $last_out:literal]) => {
            #[inline(always)]
            pub(super) unsafe fn $load(at: *const u8, len: usize) -> ($word, $word) {
                let (first, last): ($word, $word);
                // SAFETY: the caller's range.
                unsafe {
                    asm!(
                        $first_in, $last_in, at = in(reg) at, len = in(reg) len,
                        first = out($class) first, last = lateout($class) last,
                        options(nostack, preserves_flags, readonly)
                    );
                }
                (first, last)
            }

            #[inline(always)]
            pub(super) unsafe fn $store(at: *mut u8, len: usize, (first, last): ($word, $word)) {
                // SAFETY: the caller's range.
                unsafe {
                    asm!(
                        $first_out, $last_out, at = in(reg) at, len = in(reg) len,
                        first = in($class) first, last = in($class) last,
                        options(nostack, preserves_flags)
                    );
                }
            }
        };
    }

    ends!(
        load_four,
        store_four,
        u32,
        reg,
        ["mov {first:e}, dword ptr [{at}]", "mov {last:e}, dword ptr [{at} + {len} - 4]"],
        ["mov dword ptr [{at}], {first:e}", "mov dword ptr [{at} + {len} - 4], {last:e}"]
    );
    ends!(
        load_eight,
        store_eight,
        u64,
        reg,
        ["mov {first}, qword ptr [{at}]", "mov {last}, qword ptr [{at} + {len} - 8]"],
        ["mov qword ptr [{at}], {first}", "mov qword ptr [{at} + {len} - 8], {last}"]
    );
    ends!(
        load_sixteen,
        store_sixteen,
        __m128i,
        xmm_reg,
        ["movdqu {first}, xmmword ptr [{at}]", "movdqu {last}, xmmword ptr [{at} + {len} - 16]"],
        ["movdqu xmmword ptr [{at}], {first}", "movdqu xmmword ptr [{at} + {len} - 16], {last}"]
    );

    /// The C library's copy, by a call that the compiler does not know as one.
    #[inline(always)]
    pub(super) unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's ranges. The function is called by the rules of the platform; the stack is aligned, and free
        // below, since `nostack` is not said.
        unsafe {
            asm!(
                "call qword ptr [rip + {memcpy}@GOTPCREL]",
                memcpy = sym libc::memcpy,
                inlateout("rdi") to => _, inlateout("rsi") from => _, inlateout("rdx") len => _,
                clobber_abi("C")
            );
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use std::arch::aarch64::uint8x16_t;
    use std::arch::asm;

    #[inline(always)]
    pub(super) unsafe fn load_bytes(at: *const u8, len: usize) -> (u8, u8, u8) {
        let (first, middle, last): (u32, u32, u32);
        // SAFETY: the caller's range.
        unsafe {
            asm!(
                "ldrb {first:w}, [{at}]",
                "ldrb {middle:w}, [{at}, {half}]",
                "ldrb {last:w}, [{at}, {end}]",
                at = in(reg) at, half = in(reg) len / 2, end = in(reg) len - 1,
                first = out(reg) first, middle = out(reg) middle, last = lateout(reg) last,
                options(nostack, preserves_flags, readonly)
            );
        }
        (first as u8, middle as u8, last as u8)
    }

    #[inline(always)]
    pub(super) unsafe fn store_bytes(at: *mut u8, len: usize, (first, middle, last): (u8, u8, u8)) {
        // SAFETY: the caller's range.
        unsafe {
            asm!(
                "strb {first:w}, [{at}]",
                "strb {middle:w}, [{at}, {half}]",
                "strb {last:w}, [{at}, {end}]",
                at = in(reg) at, half = in(reg) len / 2, end = in(reg) len - 1,
                first = in(reg) u32::from(first), middle = in(reg) u32::from(middle), last = in(reg) u32::from(last),
                options(nostack, preserves_flags)
            );
        }
    }

    macro_rules! ends {
        ($load:ident, $store:ident, $word:ty, $class:ident, [$first_in:literal, $last_in:literal], [$first_out:literal, $last_out:literal]) => {
            #[inline(always)]
            pub(super) unsafe fn $load(at: *const u8, len: usize) -> ($word, $word) {
                let (first, last): ($word, $word);
                // SAFETY: the caller's range.
                unsafe {
                    asm!(
                        $first_in, $last_in, at = in(reg) at, end = in(reg) len - size_of::<$word>(),
                        first = out($class) first, last = lateout($class) last,
                        options(nostack, preserves_flags, readonly)
                    );
                }
                (first, last)
            }

            #[inline(always)]
            pub(super) unsafe fn $store(at: *mut u8, len: usize, (first, last): ($word, $word)) {
                // SAFETY: the caller's range.
                unsafe {
                    asm!(
                        $first_out, $last_out, at = in(reg) at, end = in(reg) len - size_of::<$word>(),
                        first = in($class) first, last = in($class) last,
                        options(nostack, preserves_flags)
                    );
                }
            }
        };
    }

    ends!(
        load_four,
        store_four,
        u32,
        reg,
        ["ldr {first:w}, [{at}]", "ldr {last:w}, [{at}, {end}]"],
        ["str {first:w}, [{at}]", "str {last:w}, [{at}, {end}]"]
    );
    ends!(
        load_eight,
        store_eight,
        u64,
        reg,
        ["ldr {first:x}, [{at}]", "ldr {last:x}, [{at}, {end}]"],
        ["str {first:x}, [{at}]", "str {last:x}, [{at}, {end}]"]
    );
    ends!(
        load_sixteen,
        store_sixteen,
        uint8x16_t,
        vreg,
        ["ldr {first:q}, [{at}]", "ldr {last:q}, [{at}, {end}]"],
        ["str {first:q}, [{at}]", "str {last:q}, [{at}, {end}]"]
    );

    /// The C library's copy, by a call that the compiler does not know as one.
    #[inline(always)]
    pub(super) unsafe fn copy_long(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the caller's ranges. The function is called by the rules of the platform.
        unsafe {
            asm!(
                "bl {memcpy}",
                memcpy = sym libc::memcpy,
                inlateout("x0") to => _, inlateout("x1") from => _, inlateout("x2") len => _,
                clobber_abi("C")
            );
        }
    }
}
