package org.ondevice.core

import java.io.File

/** The programs that the same tests run, and what Python made of them: its run's folder and its answers. */
enum class Exported(val folder: () -> File, val run: String, val answers: String) {
    ZEROTH_ORDER({ Fixtures.artifact }, "run", "answers.json"),
    BLOCKS({ Fixtures.blocks }, "blocks run", "blocks answers.json");

    val artifact: Artifact by lazy { Artifact.open(folder()) }
    val manifest: Manifest get() = artifact.manifest

    /** One process for all tests: the program keeps nothing from call to call. It ends with this JVM. */
    val program: PipeProgram by lazy { PipeProgram(folder(), Fixtures.python, Fixtures.root) }

    fun session(program: Program = this.program) = Session(artifact, program)

    fun file(name: String) = File(Fixtures.folder, "$run/$name")
}

/** What the training tests share: the data of the Python run, and trainers over the real program. */
object Runs {
    val tokenizer: Tokenizer by lazy { Fixtures.tokenizer("tiny") }

    fun items(manifest: Manifest, name: String): List<Item> =
        Encoder(tokenizer, manifest.longestTokens).encode(RowReader.read(File(Fixtures.folder, "$name.jsonl"), manifest.task)).items

    fun data(manifest: Manifest): TrainData {
        val file = File(Fixtures.folder, "train.jsonl")
        val batches = Batches(items(manifest, "train").map { it.example }, manifest.batchSize, manifest.lengthsTokens, manifest.generator.seed, tokenizer.padId)
        return TrainData(batches, Storage.sha256(file), file.name)
    }

    /** The settings of the Python run that `fixtures.py` made. */
    val settings = TrainSettings(steps = 12, learningRate = 0.01, checkpointEvery = 5, evalEvery = 6)

    val program: PipeProgram get() = Exported.ZEROTH_ORDER.program

    fun trainer(
        session: Session,
        folder: File,
        settings: TrainSettings = Runs.settings,
        mode: StartMode = StartMode.NEW,
        health: HealthSource = HealthSource { Health() },
        evaluate: Boolean = false,
        listener: TrainerListener = object : TrainerListener {},
    ) = Trainer(
        session, data(session.manifest), settings, folder, mode, ProcessMeter, health, Rules(),
        if (evaluate) Evaluator(items(session.manifest, "valid"), tokenizer.padId) else null, listener, pollMs = 20,
    )

    /** Train in [folder] with a fresh session; gives the session as it is at the end. */
    fun train(
        folder: File,
        settings: TrainSettings = Runs.settings,
        mode: StartMode = StartMode.NEW,
        exported: Exported = Exported.ZEROTH_ORDER,
        listener: TrainerListener = object : TrainerListener {},
    ): Session {
        val session = exported.session()
        val trainer = trainer(session, folder, settings, mode, listener = listener)
        trainer.run()
        val state = trainer.state
        if (state is TrainerState.Failed) throw state.error
        return session
    }
}

/**
 * A JVM of its own that trains, to be killed or to run out of space: arguments are the folder, the steps, the program and
 * the step after which it waits to be killed, or -1.
 */
object ChildMain {
    @JvmStatic
    fun main(arguments: Array<String>) {
        val listener = object : TrainerListener {
            override fun onEvent(event: Event) {
                print(event.toLine().toString(Charsets.UTF_8))
                System.out.flush()
                if (event is Event.Step && event.step == arguments[3].toInt()) Thread.sleep(Long.MAX_VALUE)
            }
        }
        try {
            Runs.train(File(arguments[0]), Runs.settings.copy(steps = arguments[1].toInt()), StartMode.RESUME, Exported.valueOf(arguments[2]), listener)
        } catch (error: OndeviceException) {
            System.err.println(error.message)
            System.exit(error.kind.exitCode)
        }
    }

    /** Start it in a shell, behind [before] (a command and `;`, such as a limit). */
    fun start(folder: File, steps: Int, exported: Exported = Exported.ZEROTH_ORDER, before: String = "", last: Int = -1): Process {
        val java = File(System.getProperty("java.home"), "bin/java").path
        val properties = listOf("ondevice.fixtures", "ondevice.artifact", "ondevice.root", "ondevice.python").map { "-D$it=${System.getProperty(it)}" }
        val command = listOf(java, "-Xshare:auto", "-XX:-UsePerfData") + properties +
            listOf("-cp", System.getProperty("surefire.test.class.path") ?: System.getProperty("java.class.path"), ChildMain::class.java.name, folder.path, "$steps", exported.name, "$last")
        val quoted = command.joinToString(" ") { "'" + it.replace("'", "'\\''") + "'" }
        return ProcessBuilder("bash", "-c", "$before exec $quoted").redirectError(ProcessBuilder.Redirect.PIPE).start()
    }
}
