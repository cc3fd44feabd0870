package org.ondevice.app

import android.content.ComponentCallbacks2
import android.content.Context
import android.os.PowerManager
import android.widget.EditText
import org.junit.Assert.assertEquals
import org.junit.Assert.assertFalse
import org.junit.Assert.assertNotNull
import org.junit.Assert.assertNull
import org.junit.Assert.assertTrue
import org.junit.Test
import org.ondevice.core.EventLog
import org.ondevice.core.JudgedAnswer
import org.ondevice.core.Rules
import org.ondevice.core.Thermal
import org.ondevice.core.TrainerState
import org.robolectric.Shadows.shadowOf
import java.io.File

class TrainScreenTest : AppTest() {
    private val live get() = app.runs.live

    private fun paused() = live?.state is TrainerState.Paused

    private fun heat(status: Int) = shadowOf(app.getSystemService(Context.POWER_SERVICE) as PowerManager).setCurrentThermalStatus(status)

    private fun prepared() {
        importModel()
        importData()
        open(2)
    }

    @Test
    fun saysWhatIsMissing() {
        open(2)
        untilSaid("Nothing to train yet")
        click("Go to Models")
        untilSaid("Import zip")
    }

    @Test
    fun trainsToTheEndAndSavesTheAdapter() {
        prepared()
        shot("train-setup")
        find<EditText>(R.id.steps).setText("600")
        find<EditText>(R.id.rate).setText("0.02")
        val gate = gate(20)
        click(R.id.start)
        until("the service to be asked") { shadowOf(app).peekNextStartedService() != null }
        assertEquals(TrainService::class.java.name, shadowOf(app).nextStartedService.component!!.className)
        val service = service()
        assertNotNull(shadowOf(service).lastForegroundNotification)
        until("some steps") { (live?.stepsDone ?: 0) >= 12 }
        untilSaid("of 600", "steps/s")
        shot("train-running")
        gate.goOn()
        until("the end", 240) { live!!.isOver }
        untilSaid("Done: 600 steps.", "before")
        val state = live!!.state as TrainerState.Finished
        assertEquals(600, state.result.steps)
        val adapters = app.store.adapters(app.store.models()[0].artifact!!)
        assertEquals(live!!.savedAdapter, adapters.activeName())
        assertTrue(adapters.activeVector().any { it != 0f })
        assertNull(app.wanted.read())
        assertTrue(shadowOf(service).isStoppedBySelf)
        val manager = app.getSystemService(Context.NOTIFICATION_SERVICE) as android.app.NotificationManager
        assertEquals("Training has ended", shadowOf(shadowOf(manager).getNotification(Notifications.WAITING)).contentTitle.toString())
        shot("train-done")
        click(R.id.another)
        untilSaid("Start training")
    }

    @Test
    fun refusesWhatIsNoNumber() {
        prepared()
        find<EditText>(R.id.steps).setText("0")
        find<EditText>(R.id.rate).setText("-1")
        click(R.id.start)
        assertNotNull(find<EditText>(R.id.steps).error)
        assertNotNull(find<EditText>(R.id.rate).error)
        assertNull(app.wanted.read())
    }

    @Test
    fun pausesForHeatAndGoesOn() {
        prepared()
        begin(4000)
        until("some steps") { live!!.stepsDone >= 3 }
        heat(Thermal.SEVERE)
        until("the pause") { paused() }
        untilSaid("the phone is hot (thermal status severe)")
        shot("train-paused")
        val done = live!!.stepsDone
        heat(Thermal.MODERATE)
        Thread.sleep(300)
        settle()
        assertTrue("goes on only below moderate", paused())
        heat(Thermal.LIGHT)
        until("more steps") { live!!.stepsDone > done }
        click(R.id.stop)
        service(TrainService.STOP)
        until("the end", 240) { live!!.isOver }
        untilSaid("Stopped after")
    }

    @Test
    fun pausesForTheBatteryUntilACharger() {
        prepared()
        begin(4000)
        until("some steps") { live!!.stepsDone >= 2 }
        battery(15, charging = false)
        until("the pause") { paused() }
        untilSaid("the battery is at 15%")
        val done = live!!.stepsDone
        battery(15, charging = true)
        until("more steps") { live!!.stepsDone > done }
        service(TrainService.STOP)
    }

    /** Exact gradients block by block: the same screen, the same run, and an adapter at the end. */
    @Test
    fun trainsABlockProgram() {
        importModel("exact", java.io.File(fixtures, "blocks"))
        importData()
        app.openProgram = { org.ondevice.core.PipeProgram(it.folder, property("ondevice.python"), java.io.File(property("ondevice.root")).canonicalFile) }
        open(2)
        begin(3)
        until("the end", 240) { live!!.isOver }
        untilSaid("Done: 3 steps.")
        val artifact = app.store.models()[0].artifact!!
        val first = artifact.first(artifact.manifest.spec.adapter).floats()
        assertFalse("the adapter is where it began", app.store.adapters(artifact).activeVector().contentEquals(first))
        open(0)
        untilSaid("mesp", Words.bytes(app, artifact.mappedBytes))
        shot("models-blocks")
    }

    /** Answers that were judged are data of a run: its log has the objective's figures, and an adapter comes out. */
    @Test
    fun learnsFromJudgedAnswers() {
        importModel("exact", java.io.File(fixtures, "writer"))
        app.openProgram = { org.ondevice.core.PipeProgram(it.folder, property("ondevice.python"), java.io.File(property("ondevice.root")).canonicalFile) }
        for (number in 0 until 22) app.store.judged.put(JudgedAnswer("What of $number?", if (number % 2 == 0) "warm" else "dull", number % 2 == 0))
        open(2)
        untilSaid("Answers that you judged")
        begin(3)
        until("the end", 240) { live!!.isOver }
        untilSaid("Done: 3 steps.", "held-out rows")
        assertTrue(live!!.savedAdapter!!.startsWith("judged answers"))
        val log = EventLog.read(File(live!!.folder, EventLog.FILE_NAME)).entries
        val steps = log.filter { it.kind == "step" }
        assertTrue(steps.size == 3 && steps.all { "kl" in it.values["preferences"] as Map<*, *> })
        val artifact = app.store.models()[0].artifact!!
        val first = artifact.first(artifact.manifest.spec.adapter).floats()
        assertFalse("the adapter is where it began", app.store.adapters(artifact).activeVector().contentEquals(first))
    }

    /** From Android 14 on nobody tells of memory: what is available is asked for. */
    @Test
    fun pausesForMemoryThatItMeasures() {
        prepared()
        val manager = shadowOf(app.getSystemService(Context.ACTIVITY_SERVICE) as android.app.ActivityManager)
        fun available(megabytes: Long) = manager.setMemoryInfo(android.app.ActivityManager.MemoryInfo().apply {
            totalMem = 4000L shl 20
            threshold = 200L shl 20
            availMem = megabytes shl 20
            lowMemory = megabytes < 200
        })
        available(2000)
        begin(4000)
        until("some steps") { live!!.stepsDone >= 2 }
        available(150)
        until("the pause") { paused() }
        untilSaid("other apps need memory (pressure low); continues below moderate")
        available(250) // more than the threshold, and not enough to spare
        Thread.sleep(1500)
        settle()
        assertTrue(paused())
        val done = live!!.stepsDone
        available(2000)
        until("more steps") { live!!.stepsDone > done }
        service(TrainService.STOP)
    }

    @Test
    fun pausesForMemory() {
        prepared()
        begin(4000)
        until("some steps") { live!!.stepsDone >= 2 }
        @Suppress("DEPRECATION")
        service().onTrimMemory(ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL)
        until("the pause") { paused() }
        untilSaid("other apps need memory (pressure critical)")
        service(TrainService.STOP)
    }

    @Test
    fun trainsOnlyWhileChargingIfAsked() {
        prepared()
        begin(4000, Rules(onlyWhileCharging = true))
        until("the pause") { paused() }
        untilSaid("no charger is connected")
        assertEquals(0, live!!.stepsDone)
        val scheduler = app.getSystemService(Context.JOB_SCHEDULER_SERVICE) as android.app.job.JobScheduler
        assertTrue(scheduler.allPendingJobs.single().isRequireCharging)
        assertTrue("it is there after a reboot", scheduler.allPendingJobs.single().isPersisted)
        assertTrue("and for the second charger, too", scheduler.allPendingJobs.single().isPeriodic)
        repeat(2) { // unplugged and plugged in again, and again
            val done = live!!.stepsDone
            battery(80, charging = true)
            until("some steps") { live!!.stepsDone > done }
            battery(80, charging = false)
            until("the pause") { paused() }
        }
        service(TrainService.STOP)
        until("the end", 240) { live!!.isOver }
        assertTrue(scheduler.allPendingJobs.isEmpty())
    }

    /** A process that dies again and again before it has saved anything is not started for ever. */
    @Test
    fun attemptsAreCountedAndShown() {
        prepared()
        val gate = gate(1)
        begin(60, id = "run-dies")
        until("a step") { live!!.stepsDone >= 1 }
        assertEquals(1, app.wanted.read()!!.attempts) // nothing is saved yet
        gate.goOn()
        until("something saved") { File(app.store.runFolder("run-dies"), "checkpoint-00000025").isDirectory && app.wanted.read()?.attempts == 0 }
        service(TrainService.STOP)
        until("the end", 240) { live!!.isOver }
        val plan = live!!.plan
        app.runs.dismiss()
        app.wanted.write(plan.copy(attempts = Runs.MAX_ATTEMPTS)) // as processes left it that the system killed
        service()
        settle()
        assertTrue(live!!.isOver)
        untilSaid("In this run the app ended 3 times before it could save anything.")
        assertNull(app.wanted.read())
        shot("train-gave-up")
        click(R.id.again)
        service()
        until("the end", 240) { live!!.isOver }
        untilSaid("Done: 60 steps.")
    }

    /** What nobody expected ends the run in words, once; the app does not die of it. */
    @Test
    fun anErrorThatNobodyExpectedIsShownOnce() {
        prepared()
        var calls = 0
        app.openProgram = {
            calls++
            object : org.ondevice.core.Program {
                override fun execute(method: String, inputs: List<org.ondevice.core.Tensor>, layer: Int): List<org.ondevice.core.Tensor> = throw StackOverflowError("deep")

                override fun close() = Unit
            }
        }
        begin(5)
        until("the error") { live!!.isOver }
        untilSaid("StackOverflowError")
        assertNull(app.wanted.read())
        assertEquals(1, calls)
    }

    @Test
    fun theUserPausesAndResumes() {
        prepared()
        begin(4000)
        until("some steps") { live!!.stepsDone >= 2 }
        click(R.id.pause)
        assertEquals(TrainService.PAUSE, shadowOf(app).nextStartedService.action)
        service(TrainService.PAUSE)
        until("the pause") { paused() }
        assertTrue(app.wanted.read()!!.paused)
        untilSaid("you paused it", "Resume")
        assertEquals(listOf("Resume", "Stop"), Notifications(app).training(live).actions.map { it.title.toString() })
        val done = live!!.stepsDone
        service(TrainService.RESUME)
        until("more steps") { live!!.stepsDone > done }
        service(TrainService.STOP)
    }

    @Test
    fun rotationKeepsTheRunAndTheSetup() {
        prepared()
        find<EditText>(R.id.steps).setText("77")
        rotate()
        assertEquals("77", find<EditText>(R.id.steps).text.toString())
        shot("train-setup-landscape")
        begin(4000)
        until("some steps") { live!!.stepsDone >= 3 }
        val before = live!!
        rotate(PHONE)
        assertTrue(live === before && !before.isOver)
        untilSaid("of 4,000")
        service(TrainService.STOP)
    }

    @Test
    fun aKilledProcessGoesOnFromItsCheckpoint() {
        prepared()
        val gate = gate(30)
        begin(60, id = "run-a")
        until("the step behind a checkpoint") { live!!.stepsDone == 30 }
        assertTrue(File(app.store.runFolder("run-a"), "checkpoint-00000025").isDirectory)
        // A kill ends the thread without a word: what it wrote stays, and the wanted run stays wanted.
        val plan = app.wanted.read()!!
        val folder = app.store.runFolder("run-a")
        val copy = File(app.cacheDir, "killed").also { folder.copyRecursively(it) }
        service(TrainService.STOP)
        gate.goOn()
        until("the end of the first process") { live!!.isOver }
        org.ondevice.core.Storage.deleteTree(folder)
        copy.copyRecursively(folder)
        app.wanted.write(plan)
        app.runs.dismiss()
        assertNull(live)
        shadowOf(app).clearStartedServices()
        controller.recreate().visible()
        assertEquals("coming back starts the service", TrainService::class.java.name, shadowOf(app).nextStartedService.component!!.className)

        service() // as START_STICKY does, with no action
        until("the end", 240) { live!!.isOver }
        val log = File(folder, "events.jsonl").readLines()
        assertTrue(log.joinToString("\n"), log.any { "\"event\": \"resume\"" in it || "\"event\":\"resume\"" in it })
        assertEquals(60, (live!!.state as TrainerState.Finished).result.steps)
        assertEquals((0 until 60).toList(), live!!.losses.map { it.first })
    }

    @Test
    fun aCheckpointThatCannotBeWrittenIsSaidInWords() {
        prepared()
        val gate = gate(2)
        begin(4000, id = "run-full")
        until("some steps") { live!!.stepsDone >= 2 }
        // A file stands where the run's folder was: the next write fails as it does on a full disk.
        val folder = app.store.runFolder("run-full")
        org.ondevice.core.Storage.deleteTree(folder)
        folder.writeText("in the way")
        service(TrainService.STOP)
        gate.goOn()
        until("the error") { live!!.isOver }
        assertEquals(org.ondevice.core.ErrorKind.STORAGE, (live!!.state as TrainerState.Failed).error.kind)
        untilSaid("Cannot write", "free some storage")
    }

    @Test
    fun aProgramThatRefusesIsSaidInWords() {
        prepared()
        app.openProgram = { throw ModuleProgram.missing(setOf("aten::x.out", "ondevice::noise"), setOf("aten::x.out"), emptySet(), setOf("XnnpackBackend"))!! }
        begin(5)
        until("the error") { live!!.isOver }
        untilSaid("ondevice::noise", "lacks what the program needs")
        shot("train-refused")
        healthyPhone()
        click(R.id.again)
        service()
        until("the end", 240) { live!!.isOver }
        untilSaid("Done: 5 steps.")
    }
}
