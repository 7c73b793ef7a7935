use super::*;

/// Every interleaving of threads that come so often each: nobody meets anybody inside.
#[cfg(loom)]
fn model(first: u32, others: &'static [u32]) {
    use loom::sync::Arc;
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let gate = Arc::new(OwnerGate::new());
        let within = Arc::new(loom::cell::UnsafeCell::new(0u32));
        let visit = |gate: &OwnerGate, within: &loom::cell::UnsafeCell<u32>, me: usize| {
            let entry = gate.enter(me);
            // Loom finds two at once here.
            within.with_mut(|count| {
                // SAFETY: whoever has come in is alone, which is what is tested.
                unsafe { *count += 1 }
            });
            gate.leave(&entry);
        };
        let running: Vec<_> = others
            .iter()
            .enumerate()
            .map(|(number, &visits)| {
                let (gate, within) = (gate.clone(), within.clone());
                loom::thread::spawn(move || (0..visits).for_each(|_| visit(&gate, &within, number + 2)))
            })
            .collect();
        (0..first).for_each(|_| visit(&gate, &within, 1));
        running.into_iter().for_each(|other| other.join().unwrap());
        let visits = first + others.iter().sum::<u32>();
        // SAFETY: the others are gone.
        within.with(|count| assert_eq!(unsafe { *count }, visits));
    });
}

#[cfg(loom)]
#[test]
fn nobody_meets_anybody_inside() {
    model(2, &[1, 1]);
}

/// One that was the owner announces itself too late, and takes that back while the next owner is inside.
#[cfg(loom)]
#[test]
fn an_owner_that_comes_too_late_takes_nothing_back_but_its_own() {
    model(2, &[2]);
    model(3, &[2]);
}

#[cfg(not(loom))]
#[test]
fn counts_of_many_threads_add_up() {
    for (threads, rounds) in [(1u64, 1_000_000u64), (2, 200_000), (4, 100_000)] {
        let lock = OwnerLock::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        let mut both = lock.lock();
                        both.0 += 1;
                        both.1 += 1;
                        assert_eq!(both.0, both.1);
                    }
                });
            }
        });
        assert_eq!(lock.lock().0, threads * rounds);
    }
}

#[cfg(not(loom))]
#[test]
fn it_goes_from_hand_to_hand() {
    let lock = std::sync::Arc::new(OwnerLock::new(0));
    for round in 0..20 {
        let other = lock.clone();
        let seen = std::thread::spawn(move || {
            let mut value = other.lock();
            *value += 1;
            *value
        });
        assert_eq!(seen.join().unwrap(), 2 * round + 1);
        *lock.lock() += 1;
    }
}

#[cfg(not(loom))]
#[test]
fn a_thread_that_takes_it_twice_is_stopped() {
    for entries in 0..3 {
        let again = std::panic::catch_unwind(|| {
            let lock = OwnerLock::new(0);
            // The first time it comes by the mutex, and then as the owner.
            (0..entries).for_each(|_| *lock.lock() += 1);
            let _has = lock.lock();
            let _twice = lock.lock();
        });
        assert!(again.is_err());
    }
}
