package org.ondevice.app

import org.ondevice.core.Artifact
import org.ondevice.core.Batches
import org.ondevice.core.Encoder
import org.ondevice.core.ErrorKind
import org.ondevice.core.Evaluator
import org.ondevice.core.Event
import org.ondevice.core.EventLog
import org.ondevice.core.Format
import org.ondevice.core.HeldOut
import org.ondevice.core.OndeviceException
import org.ondevice.core.RatedAnswers
import org.ondevice.core.RowReader
import org.ondevice.core.Session
import org.ondevice.core.StartMode
import org.ondevice.core.Storage
import org.ondevice.core.TaskRecord
import org.ondevice.core.TrainData
import org.ondevice.core.TrainSettings
import org.ondevice.core.Trainer
import org.ondevice.core.TrainerListener
import org.ondevice.core.TrainerState
import java.io.File
import java.text.SimpleDateFormat
import java.util.Date
import java.util.Locale

/** The one run that the app drives, from the plan to the saved adapter. Its fields are for the main thread. */
class Runs(private val app: OndeviceApp) : Watched() {
    /** A run as the screens see it. */
    class Live(val plan: RunPlan, val folder: File) {
        var state: TrainerState? = null
        var lastStep: Event.Step? = null
        var savedAdapter: String? = null

        /** Whether the user was told that it is over. */
        var told = false
        var error: OndeviceException? = null
        val losses = ArrayList<Pair<Int, Double>>()

        @Volatile var trainer: Trainer? = null

        /** What its adapter will have been trained to do. */
        @Volatile var task: TaskRecord? = null

        @Volatile var stopAsked = false

        @Volatile var pauseAsked = plan.paused

        val isOver get() = error != null || state is TrainerState.Finished || state is TrainerState.Failed
        val stepsDone get() = losses.lastOrNull()?.let { it.first + 1 } ?: 0
    }

    var live: Live? = null
        private set

    /** Whether a program holds the processor now; a second one would not fit beside it. */
    val isWorking get() = live?.let { !it.isOver && it.state !is TrainerState.Paused } ?: false

    /** Remember a new run as wanted; [TrainService] then starts it. The data is copied: it may be edited meanwhile. */
    fun begin(plan: RunPlan) {
        app.store.pruneRuns()
        Storage.atomicWrite(dataOf(app.store.runFolder(plan.id), plan), app.store.dataFile(plan.data).readBytes())
        app.wanted.write(plan)
        live = null
        if (plan.rules.onlyWhileCharging) ChargingJob.schedule(app)
    }

    /** Start what is wanted, unless it runs already; false when nothing is. */
    fun goOn(): Boolean {
        live?.let { if (!it.isOver) return true }
        val plan = app.wanted.read() ?: return false
        val next = Live(plan, app.store.runFolder(plan.id))
        live = next
        if (plan.attempts >= MAX_ATTEMPTS) {
            next.error = OndeviceException(
                ErrorKind.TRAINING, app.getString(R.string.gave_up, plan.attempts), null, null, app.getString(R.string.gave_up_hint),
            )
            over()
            return false
        }
        app.wanted.write(plan.copy(attempts = plan.attempts + 1))
        Thread({ drive(next) }, "ondevice-train").start()
        changed()
        return true
    }

    fun pause() = ask(true)

    fun resume() = ask(false)

    private fun ask(paused: Boolean) {
        val now = live ?: return
        now.pauseAsked = paused
        app.wanted.read()?.let { app.wanted.write(it.copy(paused = paused)) }
        now.trainer?.let { if (paused) it.pause() else it.resume() }
        changed()
    }

    fun stop() {
        val now = live
        if (now == null || now.isOver) app.wanted.clear()
        now?.stopAsked = true
        now?.trainer?.stop()
    }

    fun healthChanged() {
        live?.trainer?.healthChanged()
    }

    /** Want a run again that ended with an error: it goes on from its last checkpoint. */
    fun again() {
        val ended = live?.takeIf { it.isOver } ?: return
        app.wanted.write(ended.plan.copy(paused = false, attempts = 0))
        live = null
        changed()
    }

    /** Forget a run that is over, so that another can be set up. */
    fun dismiss() {
        if (live?.isOver == true) live = null
        changed()
    }

    /** The training thread. */
    private fun drive(live: Live) {
        app.turn.acquireUninterruptibly()
        try {
            val artifact = app.store.open(live.plan.model)
            app.openProgram(artifact).use { program ->
                val trainer = trainer(live, artifact, Session(artifact, program))
                live.trainer = trainer
                if (live.pauseAsked) trainer.pause()
                if (live.stopAsked) trainer.stop()
                trainer.run()
                finish(live, artifact, trainer.state)
            }
        } catch (error: Throwable) { // also what is nobody's plan: it is shown, and the run is not tried again by itself
            val plain = Jobs.plain(error)
            app.jobs.onMain {
                live.error = plain
                over()
            }
        } finally {
            app.turn.release()
        }
    }

    private fun trainer(live: Live, artifact: Artifact, session: Session): Trainer {
        val plan = live.plan
        val manifest = artifact.manifest
        val tokenizer = artifact.tokenizer()
        val file = dataOf(live.folder, plan)
        val rows = app.store.rows(file, artifact)
        val dataset = Encoder(tokenizer, manifest.longestTokens).encode(rows)
        live.task = TaskRecord.of(rows, dataset, tokenizer, artifact.task)
        val (train, judge) = HeldOut.split(dataset.items, session.seed)
        val adapters = app.store.adapters(artifact)
        plan.startAdapter?.let { session.restart(adapters.load(it)) }
        val batches = Batches(train.map { it.example }, manifest.batchSize, manifest.lengthsTokens, session.seed, tokenizer.padId)
        val rated = if (dataset.format != Format.THUMBS) emptyList() else listOf(train, judge).filter { it.isNotEmpty() }
            .map { RatedAnswers(it, manifest.longestTokens, tokenizer.padId) }
        val data = TrainData(batches, Storage.sha256(file), plan.data, plan.startAdapter?.let(adapters::sha256), rated)
        val evaluator = if (judge.isEmpty()) null else rated.getOrNull(1)?.judge() ?: Evaluator(judge, tokenizer.padId)
        val before = EventLog.read(File(live.folder, EventLog.FILE_NAME)).entries.filter { it.kind == "step" }
            .mapNotNull { entry -> entry.number("loss")?.let { (entry.step ?: return@mapNotNull null) to it } }
        app.jobs.onMain { live.losses.addAll(before) }
        return Trainer(
            session, data, TrainSettings(plan.steps, plan.learningRate), live.folder, StartMode.RESUME, ProcessMeter(), app.health,
            plan.rules, evaluator, Listener(live),
        )
    }

    private inner class Listener(private val live: Live) : TrainerListener {
        override fun onState(state: TrainerState) {
            if (state is TrainerState.Finished || state is TrainerState.Failed) return // told when the adapter is saved
            app.jobs.onMain {
                live.state = state
                changed()
            }
        }

        override fun onEvent(event: Event) {
            if (event is Event.Checkpoint) app.jobs.onMain { app.wanted.read()?.let { app.wanted.write(it.copy(attempts = 0)) } }
            if (event !is Event.Step) return
            app.jobs.onMain {
                while (live.losses.isNotEmpty() && live.losses.last().first >= event.step) live.losses.removeAt(live.losses.size - 1)
                live.losses.add(event.step to event.loss)
                live.lastStep = event
            }
        }
    }

    private fun finish(live: Live, artifact: Artifact, state: TrainerState) {
        var name: String? = null
        if (state is TrainerState.Finished && state.result.steps > 0) {
            val result = state.result
            val adapters = app.store.adapters(artifact)
            name = "${live.plan.data.substringBeforeLast('.').replace('/', ' ').take(40)} ${live.plan.id.removePrefix("run-")}"
            // A process that was killed just here has saved it already: the run that goes on saves it again.
            if (adapters.list().any { it.name == name }) adapters.delete(name)
            adapters.addFrom(
                File(live.folder, "adapter"), name,
                linkedMapOf(
                    "steps" to result.steps, "first_loss" to result.firstLoss, "final_loss" to result.finalLoss, "data" to live.plan.data,
                    "loss_before" to result.before?.loss, "loss_after" to result.evaluation?.loss,
                    "accuracy_before" to result.before?.accuracy, "accuracy_after" to result.evaluation?.accuracy,
                ),
                live.task,
            )
            adapters.activate(name)
        }
        app.jobs.onMain {
            live.state = state
            live.savedAdapter = name
            over()
        }
    }

    private fun over() {
        app.wanted.clear()
        ChargingJob.cancel(app)
        changed()
    }

    companion object {
        /** One name for each start, in the order of time. */
        fun newId(now: Date = Date()): String = "run-" + SimpleDateFormat("yyyy-MM-dd HH.mm.ss", Locale.ROOT).format(now)

        /** A table stays one: its name says how it is read. */
        private fun dataOf(folder: File, plan: RunPlan): File =
            File(folder, if (RowReader.isTable(plan.data)) "data." + plan.data.substringAfterLast('.') else "data.jsonl")

        /** Starts without anything saved between them; then the user decides. */
        const val MAX_ATTEMPTS = 3
    }
}
