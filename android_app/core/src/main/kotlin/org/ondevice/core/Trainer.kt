package org.ondevice.core

import java.io.File

/** What to do about a run that is in the folder already. */
enum class StartMode {
    /** Refuse when there is one. */
    NEW,

    /** Go on from its newest intact checkpoint, or begin if there is none. */
    RESUME,

    /** Delete it and begin. */
    OVERWRITE,
}

/**
 * What a run trains on.
 *
 * @property sha256 of the data file; with other data a resume is refused.
 * @property name of the file, for the log.
 * @property startAdapterSha256 of the weights of the adapter that the session holds and the run starts from; null
 *   starts from the artifact's own first values, whatever the session holds.
 * @property rated the judged answers that it learns from, in the order of [batches], and then those that are kept back, if there
 *   are such; empty for rows without a verdict.
 */
class TrainData(
    val batches: Batches, val sha256: String, val name: String, val startAdapterSha256: String? = null, val rated: List<RatedAnswers> = emptyList(),
)

/**
 * Fine-tunes: the state machine around [TrainRun]'s loop. A resumed run gives the bits of one that was never
 * interrupted.
 *
 * The loop runs on one thread, [start]'s or the caller's of [run]. [pause], [resume], [stop] and [rules] may be
 * used from any thread; they act between two steps, or two batches of an evaluation. Every pause and stop saves a
 * checkpoint first.
 *
 * @param folder the run's: `events.jsonl`, `checkpoint-*`, and at the end `adapter` (PEFT) and maybe `adapter-best`.
 * @param evaluator rows to judge before, between and after; null for none.
 * @param health asked between two steps, and every [pollMs] while paused.
 */
class Trainer(
    private val session: Session,
    private val data: TrainData,
    private val settings: TrainSettings,
    val folder: File,
    private val mode: StartMode,
    private val meter: Meter,
    private val health: HealthSource = HealthSource { Health() },
    rules: Rules = Rules(),
    private val evaluator: Judge? = null,
    private val listener: TrainerListener = object : TrainerListener {},
    private val pollMs: Long = 1000,
) {
    private val lock = Object()
    private var stopReason: String? = null
    private var userPaused = false
    private var wakes = 0
    private var thread: Thread? = null

    /** The rules in force; a change acts before the next step. */
    @Volatile
    var rules: Rules = rules
        set(value) {
            field = value
            wake { }
        }

    @Volatile
    var state: TrainerState = TrainerState.Idle
        private set

    /** Run on a thread of its own. */
    fun start() = synchronized(lock) {
        check(thread == null && state is TrainerState.Idle) { "a trainer runs once; make another" }
        thread = Thread({ run() }, "ondevice-train").also { it.start() }
    }

    /** Run on the calling thread until the end; the end is [state], not an exception. */
    fun run() {
        val run = TrainRun(session, data, settings, folder, meter, evaluator, Control())
        try {
            RunLock(folder).use {
                try {
                    change(TrainerState.Finished(run.run(mode)))
                } catch (error: Throwable) {
                    fail(run, error)
                }
            }
        } catch (error: OndeviceException) {
            if (state is TrainerState.Idle) change(TrainerState.Failed(0, error))
        }
    }

    /** Hold after the running step, until [resume]. */
    fun pause() = wake { userPaused = true }

    /** End a [pause]; reasons of the rules still hold. */
    fun resume() = wake { userPaused = false }

    /** End after the running step, with a checkpoint; [reason] goes into the log. */
    fun stop(reason: String = "user") = wake { stopReason = stopReason ?: reason }

    /** Wait for the end of [start]'s thread; false when [timeoutMs] passed first. */
    fun await(timeoutMs: Long = 0): Boolean {
        val running = synchronized(lock) { thread } ?: return true
        running.join(timeoutMs)
        return !running.isAlive
    }

    /** Tell the loop that the phone's health has changed, so that a pause begins or ends at once. */
    fun healthChanged() = wake { }

    private fun wake(change: () -> Unit) = synchronized(lock) {
        change()
        wakes++
        lock.notifyAll()
    }

    private fun change(next: TrainerState) {
        state = next
        listener.onState(next)
    }

    private fun fail(run: TrainRun, error: Throwable) {
        val known = error as? OndeviceException ?: OndeviceException(
            ErrorKind.TRAINING, "training stopped by an unexpected error", received = error.toString(),
            hint = "the last checkpoint is kept: go on from it; if it happens again, report it", cause = error,
        )
        run.failed(known)
        change(TrainerState.Failed(run.done, known))
        if (error is Error && error !is OutOfMemoryError) throw error
    }

    /** What the loop asks of its surroundings. */
    internal inner class Control {
        val stopping: String? get() = synchronized(lock) { stopReason }

        fun running(step: Int, activity: String) = change(TrainerState.Running(step, settings.steps, activity))

        fun event(event: Event) = listener.onEvent(event)

        /** Why training may not run now; [pausedFor] holds it already. */
        fun reasons(pausedFor: Set<PauseCause>): Set<PauseReason> {
            val asked = synchronized(lock) { userPaused }
            val user = if (asked) setOf(PauseReason(PauseCause.USER, "you paused it")) else emptySet()
            return user + PauseRules.reasons(health.now(), rules, pausedFor)
        }

        /** Show the pause and wait until it ends or [stop] is called; [told] hears of every change of reasons. */
        fun hold(step: Int, first: Set<PauseReason>, told: (Set<PauseReason>) -> Unit) {
            var reasons = first
            told(reasons)
            change(TrainerState.Paused(step, settings.steps, reasons))
            while (stopping == null) {
                val seen = synchronized(lock) { wakes }
                val next = reasons(reasons.map { it.cause }.toSet())
                if (next.isEmpty()) return
                if (next != reasons) {
                    reasons = next
                    told(reasons)
                    change(TrainerState.Paused(step, settings.steps, reasons))
                }
                synchronized(lock) { if (wakes == seen && stopReason == null) lock.wait(pollMs) }
            }
        }
    }
}
