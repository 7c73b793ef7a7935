//! What programs do with sockets, one test for each.

use crate::compiled::compile;
use crate::ground::{Ground, Way, is_root};
use crate::scenario::Lane::{self, Expected, Unsaid};
use crate::scenario::Scenario;

/// Both ends, one end, and neither: the same is said.
fn same(program: &str, name: &str, lane: Lane) {
    Scenario::new(&Ground::new(), program, name).compare(lane);
}

/// Plainly for a moment, to know that the test is right; under Highwire for two seconds, of which only a few moments count.
fn for_a_while(program: &str, name: &str) {
    let ground = Ground::new();
    let [plain, highwire] = [(Way::Plain, "0.2"), (Way::Highwire, "2")]
        .map(|(way, seconds)| Scenario::new(&ground, program, name).with(seconds).play(way, way));
    assert_eq!((highwire.server, highwire.client), (plain.server, plain.client));
}

#[test]
fn a_server_that_forks_for_each_connection() {
    same("serving", "forking", Unsaid);
}

#[test]
fn a_fork_in_the_middle_of_a_conversation() {
    same("serving", "late_fork", Unsaid);
}

#[test]
fn a_server_puts_itself_into_the_background_in_the_middle_of_a_conversation() {
    same("serving", "daemon", Unsaid);
}

#[test]
fn threads_share_both_ends_of_a_connection() {
    same("serving", "sharing", Unsaid);
}

#[test]
fn one_looks_while_another_one_sleeps() {
    same("serving", "beside", Unsaid);
}

#[test]
fn inetd_executes_cat_a_linked_program_and_a_static_one() {
    let ground = Ground::new();
    let echo = compile("static_echo", "static_echo", &["-static"]);
    Scenario::new(&ground, "serving", "inetd").with(echo.to_str().unwrap()).compare(Unsaid);
}

#[test]
fn a_pool_of_processes_that_accept_from_one_socket() {
    same("serving", "prefork", Unsaid);
}

#[test]
fn processes_that_share_a_port() {
    same("serving", "reuseport", Unsaid);
}

#[test]
fn a_thread_closes_what_another_one_reads() {
    same("serving", "closing", Unsaid);
}

#[test]
fn a_thread_is_cancelled_in_recv_and_nothing_is_missing() {
    same("signals", "cancel", Expected);
}

#[test]
fn records_of_a_signal_handler_come_whole_among_those_of_the_main_loop() {
    same("signals", "handler", Expected);
}

#[test]
fn jumps_out_of_every_call_that_waits_leave_everything_right() {
    same("signals", "jumping", Expected);
}

#[test]
fn a_thread_that_is_cancelled_in_epoll_wait_leaves_others_asleep_on_the_set() {
    Scenario::new(&Ground::new(), "signals", "beside_sleeper").with("cancelled").compare(Expected);
}

#[test]
fn a_handler_above_its_threads_stack_leaves_others_asleep_on_the_set() {
    Scenario::new(&Ground::new(), "signals", "beside_sleeper").with("interrupted").compare(Expected);
}

#[test]
fn a_server_that_only_listens_to_sigio() {
    same("signals", "sigio", Unsaid);
}

#[test]
fn interrupted_and_timed_out_calls_say_so() {
    same("signals", "interrupted", Unsaid);
}

#[test]
fn edges_come_when_bytes_come_and_at_no_other_time() {
    same("readiness", "edge", Expected);
}

#[test]
fn an_epoll_set_with_two_descriptors_is_one_set() {
    same("readiness", "duplicated", Expected);
}

#[test]
fn one_shot_events_come_once() {
    same("readiness", "oneshot", Expected);
}

#[test]
fn exclusive_waiters_divide_the_connections() {
    same("readiness", "exclusive", Unsaid);
}

#[test]
fn epoll_sets_in_epoll_sets() {
    same("readiness", "nested", Expected);
}

#[test]
fn one_epoll_set_in_two_processes() {
    same("readiness", "shared", Unsaid);
}

#[test]
fn every_call_that_waits_for_sockets() {
    same("readiness", "waits", Expected);
}

#[test]
fn connections_that_are_made_without_waiting() {
    same("readiness", "connecting", Unsaid);
}

#[test]
fn one_direction_ends_and_the_other_goes_on() {
    same("readiness", "half_close", Expected);
}

#[test]
fn who_sleeps_on_a_set_hears_of_a_connection_that_is_added() {
    same("readiness", "added", Expected);
}

#[test]
fn edges_tell_of_the_end_of_a_process() {
    for_a_while("readiness", "gone");
}

#[test]
fn who_polls_is_told_though_another_one_receives_too() {
    for_a_while("readiness", "helped");
}

#[test]
fn descriptors_without_lanes_are_told_in_time_beside_lanes_that_answer() {
    same("mixed", "beside", Expected);
}

#[test]
fn lanes_that_are_all_ready_take_turns_where_there_is_room_for_one() {
    same("mixed", "turns", Expected);
}

#[test]
fn signals_that_only_a_wait_lets_in_come_beside_lanes_that_answer() {
    same("mixed", "masked", Expected);
}

#[test]
fn writes_of_both_ends_do_not_wait_for_each_other() {
    same("mixed", "full", Expected);
}

#[test]
fn descriptors_go_to_another_process_with_bytes_unread() {
    same("descriptors", "passing", Unsaid);
}

#[test]
fn descriptors_are_copied_over_each_other() {
    same("descriptors", "copying", Expected);
}

#[test]
fn ranges_of_descriptors_are_closed() {
    same("descriptors", "ranges", Unsaid);
}

#[test]
fn a_child_in_the_parents_memory_closes_only_its_own_descriptors() {
    same("descriptors", "borrowing", Expected);
}

#[test]
fn a_connection_that_changes_hands_in_any_state_loses_no_byte() {
    same("inherited", "inherited", Expected);
}

#[test]
fn a_connection_that_outlives_its_sender_in_a_message_loses_no_byte() {
    same("inherited", "in_transit", Unsaid);
}

#[test]
fn a_program_closes_one_of_two_descriptors_of_an_inherited_connection() {
    same("inherited", "one_of_two", Unsaid);
}

#[test]
fn threads_use_inherited_connections_all_at_once() {
    Scenario::new(&Ground::new(), "inherited", "together").logged().compare(Unsaid);
}

#[test]
fn a_program_that_has_no_lanes_of_its_own_reads_what_lies_in_an_inherited_one() {
    same("inherited", "unwilling", Unsaid);
}

#[test]
fn a_child_in_the_parents_memory_uses_other_files_in_place_of_its_connections() {
    same("descriptors", "foreign", Unsaid);
}

#[test]
fn threads_use_an_inherited_connection_at_once() {
    same("inherited", "shared_at_once", Unsaid);
}

#[test]
fn stdio_of_an_inherited_connection_misses_nothing() {
    same("inherited", "by_stdio", Unsaid);
}

#[test]
fn of_two_threads_that_close_duplicates_at_once_one_closes_the_connection() {
    let ground = Ground::new();
    // The moment is short, and both CPUs must have it.
    for _attempt in 0..4 {
        let (mut server, _) =
            Scenario::new(&ground, "descriptors", "closed_at_once").roles(Way::Highwire, Way::Highwire);
        let process = server.told("hold").parse().unwrap();
        assert_eq!(ground.sockets(process), Some(0), "sockets that nobody has any more");
        server.end_input();
        assert!(server.ended().status.success());
    }
}

#[test]
fn of_two_threads_that_close_duplicates_of_a_set_at_once_one_closes_the_set() {
    same("descriptors", "sets_closed", Unsaid);
}

#[test]
fn programs_are_started_in_the_middle_of_a_conversation() {
    same("descriptors", "spawning", Expected);
}

#[test]
fn a_program_replaces_itself_and_goes_on_talking() {
    same("descriptors", "replaced", Unsaid);
}

#[test]
fn a_listener_that_was_inherited_over_exec_gives_lanes() {
    same("descriptors", "activated", Expected);
}

#[test]
fn every_call_that_sends_and_every_call_that_receives() {
    same("moving", "calls", Expected);
}

#[test]
fn addresses_control_data_and_flags_keep_bytes_in_order() {
    same("moving", "with_more", Expected);
}

#[test]
fn a_lot_both_ways_at_once() {
    same("moving", "lots", Unsaid);
}

#[test]
fn stdio_alone_and_mixed_with_calls() {
    same("moving", "stdio", Unsaid);
}

#[test]
fn a_stream_that_is_opened_late_has_the_bytes_that_wait() {
    same("moving", "opened_late", Expected);
}

#[test]
fn corks_and_more_to_come() {
    same("moving", "cork", Unsaid);
}

#[test]
fn urgent_bytes_keep_their_place() {
    same("moving", "urgent", Unsaid);
}

#[test]
fn files_go_out_between_records() {
    same("moving", "sendfile", Unsaid);
}

#[test]
fn a_proxy_that_splices() {
    same("moving", "splicing", Unsaid);
}

#[test]
fn a_full_pipe_is_told_to_who_splices_without_waiting() {
    same("moving", "full_pipe", Expected);
}

#[test]
fn a_message_with_control_bytes_that_cannot_be_passes_nothing() {
    same("edges", "refused", Expected);
}

#[test]
fn threads_with_little_stack_wait_send_and_receive() {
    same("edges", "small", Unsaid);
}

#[test]
fn three_hundred_connections_in_one_selection() {
    same("edges", "selecting", Unsaid);
}

#[test]
fn a_limit_on_the_time_of_sends_is_kept_with_a_lane_that_is_full() {
    same("edges", "patient", Expected);
}

#[test]
fn a_signal_ends_a_receive_that_waits_for_all_of_its_bytes() {
    same("edges", "partly", Unsaid);
}

/// The README names how much more it may be than on TCP.
#[test]
fn a_writer_that_does_not_wait_has_a_mebibyte_more_under_way_and_no_further() {
    same("edges", "queued", Expected);
}

#[test]
fn descriptors_go_to_another_process_among_many_messages() {
    same("edges", "many", Unsaid);
}

#[test]
fn io_uring_alone_and_after_a_hundred_calls() {
    let ground = Ground::new();
    let scenario = Scenario::new(&ground, "kernel", "uring");
    let plain = scenario.play(Way::Plain, Way::Plain);
    if plain.server.iter().any(|line| line.contains("forbidden")) {
        eprintln!("SKIPPED: io_uring on sockets: this kernel forbids it");
        return;
    }
    scenario.compare(Unsaid);
}

#[test]
fn system_calls_through_libc() {
    same("kernel", "syscall", Unsaid);
    same("kernel", "later_syscall", Unsaid);
}

#[test]
fn waits_that_libc_does_not_see() {
    same("kernel", "waiting", Unsaid);
}

#[test]
fn a_hundred_connections_in_one_list() {
    same("many", "listed", Unsaid);
}

#[test]
fn system_calls_by_an_instruction_of_the_program() {
    same("kernel", "instruction", Unsaid);
}

#[test]
#[ignore = "nobody sees an instruction: whoever has used recv before keeps its lane open, and sleeps in the kernel"]
fn system_calls_by_an_instruction_after_libcs() {
    same("kernel", "later_instruction", Unsaid);
}

#[test]
fn a_client_that_scribbles_on_the_locks_does_not_stop_the_server() {
    same("kernel", "scribbled", Expected);
    let ground = Ground::new();
    Scenario::new(&ground, "kernel", "scribbled").with("has-a-region").play(Way::Highwire, Way::Highwire);
}

#[test]
fn a_filter_that_kills_comes_before_or_after_the_connection() {
    let ground = Ground::new();
    let empty = ground.directory("empty");
    for when in ["later", "earlier"] {
        let scenario = Scenario::new(&ground, "sandbox", when).with("filter").with(empty.to_str().unwrap());
        scenario.compare(Unsaid);
    }
    Scenario::new(&ground, "sandbox", "strict").compare(Unsaid);
    // And one that was there before the program.
    Scenario::new(&ground, "sandbox", "confined").compare(Unsaid);
}

#[test]
fn another_root_another_user_and_another_network_before_or_after_the_connection() {
    if !is_root("chroot, setuid and unshare under Highwire") {
        return;
    }
    let ground = Ground::new();
    let empty = ground.directory("empty");
    for (when, how) in [
        ("later", "chroot"),
        ("later", "setuid"),
        ("later", "unshare"),
        ("later", "everything"),
        ("earlier", "chroot"),
        ("earlier", "setuid"),
    ] {
        Scenario::new(&ground, "sandbox", when).with(how).with(empty.to_str().unwrap()).compare(Unsaid);
    }
}
