package org.ondevice.core

import java.io.File

/** One run: its folder, its log, its checkpoints, and what happens at a step and after it. */
internal class TrainRun(
    private val session: Session,
    private val data: TrainData,
    private val settings: TrainSettings,
    private val folder: File,
    private val meter: Meter,
    private val evaluator: Judge?,
    private val control: Trainer.Control,
) {
    private val manifest = session.manifest
    private val seed = session.seed
    private val schedule = Schedule(settings.schedule, settings.learningRate, settings.steps, settings.warmupSteps)
    private val identity = identity()
    private val checkpoints = Checkpoints(folder, identity, session.backend)
    private val history = History()
    private val evaluated = HashSet<Int>()
    private var log: EventLog? = null
    private var saved = -1

    /** The adapter that the run starts from. */
    private val first = if (data.startAdapterSha256 == null) session.artifact.first(manifest.spec.adapter).floats() else session.adapter.copyOf()
    private var before: EvalResult? = null
    private var evaluation: EvalResult? = null

    /** Steps that are done. */
    var done = 0
        private set

    fun run(mode: StartMode): RunResult {
        open(mode)
        if (!compare(mode)) return end()
        if (done == 0 && settings.evaluateBefore) before = evaluate()?.first
        if (done > 0) evaluateAndSave(save = false)
        while (done < settings.steps) {
            holdWhilePaused()
            if (control.stopping != null) break
            step()
            evaluateAndSave(save = done == settings.steps || done % settings.checkpointEvery == 0)
        }
        val result = end()
        log?.close()
        return result
    }

    /** Log the error that ended the run, as far as the disk lets it. */
    fun failed(error: OndeviceException) {
        try {
            log?.write(Event.Error(done, error.toJson()))
            log?.sync()
        } catch (_: OndeviceException) {
            // a full disk is the error itself
        }
        log?.close()
        control.event(Event.Error(done, error.toJson()))
    }

    private fun open(mode: StartMode) {
        val path = File(folder, EventLog.FILE_NAME)
        if (mode == StartMode.NEW && (checkpoints.folders().isNotEmpty() || EventLog.read(path).entries.isNotEmpty())) {
            throw OndeviceException(
                ErrorKind.CHECKPOINT, "${folder.name} already holds a run", hint = "go on with it, or start it over",
            )
        }
        val warnings = ArrayList<String>()
        var content = LogContent(emptyList(), 0)
        var from = ""
        if (mode == StartMode.RESUME) {
            checkpoints.removeLeftovers()
            EventLog.read(path).start?.let { Checkpoints.checkIdentity(it.values["identity"] as? Map<*, *> ?: emptyMap<String, Any?>(), identity, path.name) }
            checkpoints.newest { warnings.add(it) }?.let { checkpoint ->
                session.load(checkpoint.state)
                done = checkpoint.step
                saved = done
                from = checkpoint.folder.name
            }
            content = EventLog.cut(path, done)
        } else {
            checkpoints.clear()
            path.delete()
        }
        if (done == 0) session.restart(if (data.startAdapterSha256 == null) null else session.adapter)
        val steps = content.entries.filter { it.kind == "step" }
        steps.forEach(history::add)
        if (steps.mapNotNull { it.step } != (0 until done).toList()) warnings.add("${path.name} lacks steps before step $done")
        content.entries.filter { it.kind == "evaluate" }.forEach { entry -> entry.step?.let(evaluated::add) }
        log = EventLog(path)
        write(if (content.start == null) start() else Event.Resume(done, settings.steps, session.backend, from))
        warnings.forEach { write(Event.Warning(it, done)) }
    }

    /** Learn what judged answers are compared with: the model before the first step. False if stopped before that. */
    private fun compare(mode: StartMode): Boolean {
        val rated = data.rated.ifEmpty { return true }
        rated[0].check()
        val rows = Storage.sha256(rated.flatMap { it.items }.joinToString("\n") { it.example.ids.joinToString(" ") + it.liked }.toByteArray())
        val named = mapOf("model" to manifest.modelSha256, "start" to (data.startAdapterSha256 ?: "none"), "rows" to rows)
        control.running(done, "preparing")
        return RatedAnswers.begin(rated, session, first, folder, named, mode == StartMode.RESUME) {
            if (holdWhilePaused()) control.running(done, "preparing")
            control.stopping != null
        }
    }

    private fun step() {
        val step = done
        control.running(step, "training")
        val batch = data.batches.at(step)
        val rate = schedule.at(step)
        val started = System.nanoTime()
        val result = data.rated.firstOrNull()?.step(session, data.batches.rowsAt(step), batch, step, rate) ?: session.step(batch, step, rate)
        val seconds = maxOf((System.nanoTime() - started) / 1e9, 1e-9)
        checkFinite("loss", result.loss, step, rate)
        result.projectedGradients.forEach { checkFinite("projected gradient", it.toDouble(), step, rate) }
        val tokens = batch.ids.size
        val peak = maxOf(meter.peakMemoryBytes(), history.peakMemoryBytes)
        write(
            Event.Step(
                step, result.loss, result.losses.asList(), result.projectedGradients.asList(), rate, tokens, seconds,
                tokens / seconds, peak, history.etaS(seconds, settings.steps - step - 1), result.figures,
            ),
        )
        result.warning?.let { write(Event.Warning(it, step)) }
        history.add(result.loss, seconds, tokens, peak)
        done = step + 1
    }

    private fun checkFinite(name: String, value: Double, step: Int, rate: Double) {
        if (value.isFinite()) return
        throw notANumber("the $name of step $step is $value", "$value at learning rate $rate")
    }

    private fun notANumber(what: String, received: String): OndeviceException {
        val kept = if (saved >= 0) "the checkpoint after $saved steps is kept" else "there is no checkpoint yet"
        return OndeviceException(
            ErrorKind.TRAINING, "$what; $kept", "a finite number", received, "a lower learning rate, or a program exported with other settings of its method",
        )
    }

    private fun due(): Boolean = evaluator != null && done !in evaluated &&
        (done == settings.steps || (settings.evalEvery > 0 && done % settings.evalEvery == 0))

    /** After a step: an evaluation if one is due, a checkpoint if one is due or this is the best. */
    private fun evaluateAndSave(save: Boolean) {
        val judged = if (due() && control.stopping == null) evaluate() else null
        judged?.let { evaluation = it.first }
        if (save || judged?.second == true) save(judged?.first)
    }

    /** Judge the adapter as it is now; the result and whether it is the best of the run. Null if asked to stop. */
    private fun evaluate(): Pair<EvalResult, Boolean>? {
        if (evaluator == null || done in evaluated) return null
        control.running(done, "evaluating")
        val result = evaluator.run(session, session.adapter) {
            if (holdWhilePaused()) control.running(done, "evaluating")
            control.stopping != null
        } ?: return null
        val known = checkpoints.best()
        val best = done > 0 && (known == null || Checkpoints.compareScores(result.score, known.first) > 0)
        write(Event.Evaluate(done, result.loss, result.accuracy, result.majorityShare, result.rows, result.secondsS, best, result.preferences))
        evaluated.add(done)
        return result to best
    }

    private fun save(evaluation: EvalResult? = null) {
        control.running(done, "saving")
        val state = session.state()
        state.entries.firstOrNull { (_, tensor) -> tensor.floats?.any { !it.isFinite() } == true }?.let { (name, _) ->
            throw notANumber("step ${done - 1} left values in the $name that are no numbers", "inf or nan")
        }
        val started = System.nanoTime()
        log?.sync()
        val path = checkpoints.save(done, state, evaluation)
        saved = done
        write(Event.Checkpoint(done, path.name, Storage.sizeBytes(path), (System.nanoTime() - started) / 1e9))
    }

    /** Wait, with a checkpoint saved, as long as there is a reason to; false when there was none. */
    private fun holdWhilePaused(): Boolean {
        val reasons = control.reasons(emptySet())
        if (reasons.isEmpty() || control.stopping != null) return false
        try {
            if (done > 0 && saved != done) save()
        } catch (error: OndeviceException) {
            if (error.kind != ErrorKind.STORAGE || reasons.none { it.cause == PauseCause.DISK }) throw error
            write(Event.Warning("no checkpoint at this pause: ${error.what}", done))
        }
        session.program.unload()
        control.hold(done, reasons) { now -> write(Event.Warning("paused: " + now.joinToString("; "), done)) }
        if (control.stopping == null) write(Event.Warning("goes on", done))
        return true
    }

    private fun end(): RunResult {
        val stopped = control.stopping?.takeIf { done < settings.steps }
        if (stopped != null) {
            if (done > 0 && saved != done) save()
            write(Event.Interrupt(done, stopped))
        } else {
            write(Event.Finish(done, history.firstLoss, history.finalLoss, history.stepTimeS, history.tokensPerS, history.peakMemoryBytes))
        }
        log?.sync()
        if (done > 0) writeAdapters()
        return RunResult(
            done, history.firstLoss, history.finalLoss, history.stepTimeS, history.tokensPerS, history.peakMemoryBytes,
            stopped != null, before, evaluation,
        )
    }

    private fun writeAdapters() {
        val peft = PeftAdapter(session.artifact)
        Storage.atomicFolder(File(folder, ADAPTER)) { peft.write(session.adapter, it) }
        val best = checkpoints.best()?.second ?: return
        val newest = checkpoints.folders().lastOrNull()
        if (best != newest) Storage.atomicFolder(File(folder, BEST_ADAPTER)) { into ->
            peft.write(checkpoints.read(best).state.getValue(manifest.spec.adapter.name).floats!!, into)
        }
    }

    private fun write(event: Event) {
        log?.write(event)
        control.event(event)
    }

    private fun start() = Event.Start(
        config = linkedMapOf(
            "model" to mapOf("source" to manifest.modelSource), "data" to mapOf("path" to data.name),
            "method" to manifest.method.values + ("learning_rate" to settings.learningRate), "train" to settings.toJson(),
        ),
        identity = identity, seed = seed, backend = session.backend, generatorBackend = session.generatorBackend,
        modelSource = manifest.modelSource, modelSha256 = manifest.modelSha256, steps = settings.steps,
        data = mapOf("train" to mapOf("sequences" to data.batches.sequences)),
    )

    private fun identity(): Map<String, Any?> {
        val found = linkedMapOf<String, Any?>(
            "model" to manifest.modelSha256, "seed" to seed, "artifact" to manifest.files[manifest.program], "manifest" to manifest.sha256,
            "learning_rate" to settings.learningRate, "schedule" to settings.schedule.manifestName, "warmup_steps" to settings.warmupSteps,
            "data" to linkedMapOf("sha256" to data.sha256, "batch_size" to manifest.batchSize),
        )
        if (settings.schedule != ScheduleKind.CONSTANT || settings.warmupSteps > 0) found["steps"] = settings.steps
        data.startAdapterSha256?.let { found["adapter"] = it }
        data.rated.firstOrNull()?.let { found += it.objective.identity() }
        return found
    }

    companion object {
        const val ADAPTER = "adapter"
        const val BEST_ADAPTER = "adapter-best"
    }
}
